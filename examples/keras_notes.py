"""The first example of TensorFlow's notes on distribution, as it is written there but for the lines that import.

With TensorFlow installed, its own `tf.data.Dataset` can be given to `fit`, too. On two simulated GPUs:

STRATAGEM_SIMULATE=gpu:2 python examples/keras_notes.py
"""

import numpy as np
from keras_names import tf

mirrored_strategy = tf.distribute.MirroredStrategy()

with mirrored_strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(1,))])

model.compile(loss="mse", optimizer="sgd")

dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(100).batch(10)
model.fit(dataset, epochs=2)
model.evaluate(dataset)

inputs, targets = np.ones((100, 1)), np.ones((100, 1))
model.fit(inputs, targets, epochs=2, batch_size=10)

# Compute global batch size using number of replicas.
BATCH_SIZE_PER_REPLICA = 5
global_batch_size = BATCH_SIZE_PER_REPLICA * mirrored_strategy.num_replicas_in_sync
dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(100)
dataset = dataset.batch(global_batch_size)

LEARNING_RATES_BY_BATCH_SIZE = {5: 0.1, 10: 0.15}
learning_rate = LEARNING_RATES_BY_BATCH_SIZE[global_batch_size]

# What the notes leave to the reader.
model.compile(loss="mse", optimizer=tf.keras.optimizers.SGD(learning_rate))
model.fit(dataset, epochs=2)
print(f"global batch size {global_batch_size}, learning rate {learning_rate}")
