"""Write OpenVINO's own files of a finished ONNX file: the network (.xml), and its weights beside it (.bin)."""

from pathlib import Path

from mtrain.errors import SpecError, UsageError
from mtrain_deploy.exported.metadata import KEY, Metadata

WEIGHTS_SUFFIX = ".bin"


def need_openvino() -> None:
    """Refuse where OpenVINO is not installed.

    Raises:
        UsageError: It is not.
    """
    try:
        import openvino  # noqa: F401
    except ImportError:
        raise UsageError(
            "--format openvino needs the package openvino; install it with: pip install openvino, or give --format onnx, "
            "which OpenVINO reads too"
        ) from None


def convert(onnx_file: Path, target: Path, metadata: Metadata) -> Path:
    """Convert an ONNX file; return ``target``, beside which its weights are.

    Weights keep their type: OpenVINO would halve them by default. The metadata are the entry ``mtrain`` of ``rt_info``.

    Raises:
        SpecError: OpenVINO has no operator for a part of the graph.
    """
    import openvino

    try:
        model = openvino.convert_model(str(onnx_file))
    except Exception as error:  # its errors have no common type
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise SpecError(f"--format openvino: OpenVINO cannot convert the graph ({reason[:300]})") from error
    model.set_rt_info(metadata.text(), [KEY])
    # OpenVINO would halve weights by default.
    openvino.save_model(model, str(target), compress_to_fp16=False)
    return target
