"""``mtrain.session``: a user's own training script on any backend.

``mtrain run SCRIPT`` starts the ranks; the script joins them with ``with mtrain.session() as session:``. The session
hands out a prepared model, the batches of this rank, evaluations and logging. Importing this package imports no
framework.
"""
