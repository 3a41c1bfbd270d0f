"""The parameter server between machines: frames, sealing, the server of a ps task, the client of a worker."""
