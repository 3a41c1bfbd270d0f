"""Training without writing the loop: Keras fit, Estimator, moving averages, checkpoints."""
