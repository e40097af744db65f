"""Translate the network of a PaddleDetection file that is RT-DETR: architecture ``DETR`` with ``RTDETRTransformer``.

The network of mtrain is transformers', so what shapes it becomes entries of transformers' configuration.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mtrain.spec.importers.key_report import Book, equal, is_number, show_value

CARDS = 4
"""Number of cards for which the published files of RT-DETR are written."""
MODEL = "rt_detr"
_QUERIES = 300
"""transformers' default."""
_WHAT = "transformers' RT-DETR"
_PARTS = {
    "neck": "HybridEncoder",
    "transformer": "RTDETRTransformer",
    "detr_head": "DINOHead",
    "post_process": "DETRPostProcess",
}
_STAGES = ["stage2", "stage3", "stage4"]
_RESNETS: Mapping[int, tuple[str, Sequence[int], int]] = {
    18: ("basic", [2, 2, 2, 2], 64),
    34: ("basic", [3, 4, 6, 3], 64),
    50: ("bottleneck", [3, 4, 6, 3], 256),
    101: ("bottleneck", [3, 4, 23, 3], 256),
}
"""Kind of block, blocks of each stage, and channels of the first stage, by depth."""
_HGNETS: Mapping[str, tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]]] = {
    "L": ([3, 32, 48], [48, 96, 192, 384], [128, 512, 1024, 2048], [1, 1, 3, 1]),
    "X": ([3, 32, 64], [64, 128, 256, 512], [128, 512, 1024, 2048], [1, 2, 5, 2]),
    "H": ([3, 48, 96], [96, 192, 384, 768], [192, 512, 1024, 2048], [2, 3, 6, 3]),
}
"""Channels of the stem, inner and outer channels of the stages, and their blocks, by size."""
_ENCODER = {
    "hidden_dim": "encoder_hidden_dim",
    "use_encoder_idx": "encode_proj_layers",
    "num_encoder_layers": "encoder_layers",
    "expansion": "hidden_expansion",
    "encoder_layer.nhead": "encoder_attention_heads",
    "encoder_layer.dim_feedforward": "encoder_ffn_dim",
    "encoder_layer.dropout": "dropout",
    "encoder_layer.activation": "encoder_activation_function",
}
_DECODER = {
    "num_queries": "num_queries",
    "feat_strides": "feat_strides",
    "num_levels": "num_feature_levels",
    "nhead": "decoder_attention_heads",
    "num_decoder_layers": "decoder_layers",
    "dim_feedforward": "decoder_ffn_dim",
    "activation": "decoder_activation_function",
    "num_denoising": "num_denoising",
    "label_noise_ratio": "label_noise_ratio",
    "box_noise_scale": "box_noise_scale",
    "learnt_init_query": "learn_initial_query",
}
_LOSS = {
    "loss_coeff.class": "weight_loss_vfl",
    "loss_coeff.bbox": "weight_loss_bbox",
    "loss_coeff.giou": "weight_loss_giou",
    "matcher.matcher_coeff.class": "matcher_class_cost",
    "matcher.matcher_coeff.bbox": "matcher_bbox_cost",
    "matcher.matcher_coeff.giou": "matcher_giou_cost",
    "aux_loss": "auxiliary_loss",
}
_FRACTIONS = {"dropout", "hidden_expansion", "label_noise_ratio", "box_noise_scale", *_LOSS.values()} - {
    "auxiliary_loss"
}
_STEM = [r"^model\.backbone\.model\.embedder\."]
_FIXED: Mapping[str, Any] = {
    "HybridEncoder.encoder_layer.name": "TransformerLayer",
    "HybridEncoder.depth_mult": 1.0,
    "RTDETRTransformer.position_embed_type": "sine",
    "RTDETRTransformer.dropout": 0.0,
    "RTDETRTransformer.query_pos_head_inv_sig": False,
    "DINOHead.loss.name": "DINOLoss",
    "DINOHead.loss.use_vfl": True,
    "DINOHead.loss.matcher.name": "HungarianMatcher",
    "use_focal_loss": True,
}
"""Settings that shape the network or its loss, and that transformers' network always has."""


def is_one(book: Book) -> bool:
    """Return whether the file describes RT-DETR."""
    return (book.get("architecture"), book.get("DETR.transformer")) == ("DETR", "RTDETRTransformer")


def translate(book: Book) -> str:
    """Enter the network and return the model's name.

    Raises: ``SpecError`` for a network that transformers' RT-DETR is not.
    """
    _check(book)
    config: dict[str, Any] = {}
    _backbone(book, config)
    config["decoder_in_channels"] = [book.integer("HybridEncoder.hidden_dim", 256)] * 3
    for section, keys in (("HybridEncoder", _ENCODER), ("RTDETRTransformer", _DECODER), ("DINOHead.loss", _LOSS)):
        for key, name in keys.items():
            _put(book, f"{section}.{key}", config, name)
    _put(book, "hidden_dim", config, "d_model")
    # As default it is lowered where an image has fewer cells, and refused where it is asked for.
    if config.get("num_queries") == _QUERIES:
        del config["num_queries"]
    for name, value in config.items():
        book.put(f"model.options.config.{name}", value, "architecture")
    book.put("model.name", MODEL, "architecture")
    for key in ("architecture", "DETR"):
        book.same(key, f"model.name: {MODEL}")
    book.carry("DETRPostProcess.num_top_queries", "model.options.max_detections")
    book.drop("RTDETRTransformer.eval_idx", f"{_WHAT} is evaluated with its last layer")
    book.note("backend: rt_detr is a model of torch; `--backend fleet` cannot train it")
    return MODEL


def _check(book: Book) -> None:
    """Enter what transformers' RT-DETR always has, and refuse what it cannot have."""
    for part, expected in _PARTS.items():
        if book.get(("DETR", part)) != expected:
            raise book.refuse(("DETR", part), f"expected {expected}: mtrain imports RT-DETR and no other DETR")
    width = book.integer("HybridEncoder.hidden_dim", 256)
    for key, value in {**_FIXED, "HybridEncoder.encoder_layer.d_model": width}.items():
        book.require(key, value, what=_WHAT)
    if equal(book.get("eval_size"), [640, 640]):
        book.same("eval_size", "positions are computed for the size of the images")
    if equal(book.get("ema_filter_no_grad"), other=True):
        book.same("ema_filter_no_grad", "the average of a weight that is not trained is the weight")


def _put(book: Book, source: str, config: dict[str, Any], name: str) -> None:
    if book.has(source):
        value = book.get(source)
        # transformers checks types, and takes no whole number where it has a fraction.
        config[name] = float(value) if name in _FRACTIONS and is_number(value) else value
        book.same(source, f"model.options.config.{name}: {show_value(config[name])}")


def _backbone(book: Book, config: dict[str, Any]) -> None:
    """Enter the backbone, which of its layers are not trained, and how fast it learns."""
    kind = book.word("DETR.backbone", "ResNet")
    if kind not in _BACKBONES:
        raise book.refuse("DETR.backbone", f"expected one of {', '.join(_BACKBONES)}")
    network, channels = _BACKBONES[kind](book)
    for key in ("return_idx", "out_indices"):
        if book.has((kind, key)) and not equal(book.get((kind, key)), [1, 2, 3]):
            raise book.refuse((kind, key), "expected [1, 2, 3]: the last three stages")
        book.same((kind, key), "the last three stages")
    for key in ("depth", "variant", "num_stages", "arch", "drop_path_rate"):
        book.same((kind, key), f"model.options.config.backbone_config: {network['model_type']}")
    config |= {"backbone_config": {**network, "out_features": _STAGES}, "encoder_in_channels": list(channels[1:])}
    for other in _BACKBONES:
        if other != kind:
            book.drop(other, f"the backbone is {kind}")
    if kind != "SwinTransformer":
        _train_backbone(book, kind, config)


def _resnet(book: Book) -> tuple[dict[str, Any], Sequence[int]]:
    depth = book.integer("ResNet.depth", 50)
    if depth not in _RESNETS or book.get("ResNet.variant") != "d":
        raise book.refuse("ResNet.depth", f"expected variant d with one of {', '.join(map(str, _RESNETS))}")
    block, depths, first = _RESNETS[depth]
    channels = [first * 2**stage for stage in range(4)]
    network = {"model_type": "rt_detr_resnet", "layer_type": block, "embedding_size": 64, "depths": depths}
    return {**network, "hidden_sizes": channels}, channels


def _hgnet(book: Book) -> tuple[dict[str, Any], Sequence[int]]:
    arch = book.word("PPHGNetV2.arch", "")
    if arch not in _HGNETS:
        raise book.refuse("PPHGNetV2.arch", f"expected one of {', '.join(_HGNETS)}")
    stem, inner, channels, blocks = _HGNETS[arch]
    network = {
        "model_type": "hgnet_v2",
        "stem_channels": stem,
        "stage_in_channels": [stem[-1], *channels[:-1]],
        "stage_mid_channels": inner,
        "stage_out_channels": channels,
        "stage_num_blocks": blocks,
        "stage_numb_of_layers": [6] * 4,
    }
    return network, channels


def _swin(book: Book) -> tuple[dict[str, Any], Sequence[int]]:
    if book.get("SwinTransformer.arch") != "swin_L_384":
        raise book.refuse("SwinTransformer.arch", "expected swin_L_384")
    book.require("SwinTransformer.ape", value=False, what="transformers' Swin")
    book.require("SwinTransformer.patch_norm", value=True, what="transformers' Swin")
    rate = book.number("SwinTransformer.drop_path_rate", 0.2)
    network = {
        "model_type": "swin",
        "image_size": 384,
        "embed_dim": 192,
        "depths": [2, 2, 18, 2],
        "num_heads": [6, 12, 24, 48],
    }
    return {**network, "window_size": 12, "drop_path_rate": rate}, [192 * 2**stage for stage in range(4)]


_BACKBONES = {"ResNet": _resnet, "PPHGNetV2": _hgnet, "SwinTransformer": _swin}


def _train_backbone(book: Book, kind: str, config: dict[str, Any]) -> None:
    frozen = book.truth((kind, "freeze_norm"), default=True)
    config["freeze_backbone_batch_norms"] = frozen
    book.same((kind, "freeze_norm"), f"model.options.config.freeze_backbone_batch_norms: {show_value(frozen)}")
    book.same((kind, "norm_type"), "frozen, or as train.sync_batchnorm says")
    book.drop((kind, "norm_decay"), "PaddleDetection's AdamW decays every parameter")
    if book.integer((kind, "freeze_at"), 0) >= 0:
        if not book.truth((kind, "freeze_stem_only"), default=kind != "ResNet"):
            raise book.refuse((kind, "freeze_at"), "expected freeze_stem_only: true")
        book.put("train.freeze", _STEM, (kind, "freeze_at"))
    for key in ("freeze_at", "freeze_stem_only"):
        book.same((kind, key), "train.freeze: the stem, or nothing")
    factors = book.get((kind, "lr_mult_list"))
    if not isinstance(factors, list) or not factors:
        return
    stem, stages, last = factors[:-4], factors[-4:], factors[-1]
    if stages != [last] * 4 or stem not in ([], [0], [last]):
        book.drop((kind, "lr_mult_list"), "mtrain has one factor for the backbone here")
        return
    if stem == [0]:
        book.put("train.freeze", _STEM, (kind, "lr_mult_list"))
    group = {"match": r"^model\.backbone\.", "learning_rate_factor": last}
    remark = f"optimizer.groups.0.learning_rate_factor: {show_value(last)}"
    book.settle((kind, "lr_mult_list"), "optimizer.groups", [group, {"match": ""}], remark=remark)
