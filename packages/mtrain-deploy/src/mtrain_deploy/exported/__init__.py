"""Exported models: ONNX files that `mtrain export` wrote, used with ONNX Runtime and without any framework.

The face for other parts of mtrain:

* ``metadata.Metadata``: everything an exported file says about itself; ``metadata.KEY`` is the name of its JSON text
  among the file's own metadata (``metadata_props``).
* ``model.ExportedModel``: an opened file: ``outputs`` and ``predictions`` of a batch.
* ``data.evaluation_data`` and ``data.image_data``: the data of an evaluation or of a prediction with such a file, and
  ``data.micro_batches``, which yields their batches.
* ``evaluation.evaluate`` and ``prediction.predict``: what ``mtrain evaluate`` and ``mtrain predict`` do with it.

::

    from mtrain_deploy.exported.data import micro_batches, image_data
    from mtrain_deploy.exported.model import ExportedModel

    model = ExportedModel.open(Path("digits.onnx"), threads=1)
    data = image_data(model.spec(), model.metadata, [Path("a.jpg")])
    for batch in micro_batches(data, size=1):
        print(model.predictions(batch))
"""
