"""The parts of the cluster ``kubernetes``: options, manifests of its two kinds of job, and the client of the API server."""
