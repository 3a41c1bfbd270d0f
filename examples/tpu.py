"""Trains a network on TPUs with TPUStrategy: real ones, those that torch_xla makes of the CPU, or simulated ones.

python examples/tpu.py                                            # 4 TPUs, simulated if there are none
PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 python examples/tpu.py          # with torch_xla, on the CPU
"""

import torch
from digits import load_digits
from torch import nn
from torch.utils.data import DataLoader

import stratagem as sg

if __name__ == "__main__":
    if not sg.config.list_physical_devices("TPU"):
        sg.config.simulate_devices("TPU", 4)
    train_set, test_set = load_digits()
    test_images, test_labels = test_set.tensors
    torch.manual_seed(0)
    loader = DataLoader(train_set, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0))
    with sg.TPUStrategy() as strategy:
        with strategy.scope():
            model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
            optimizer = torch.optim.Adam(model.parameters(), lr=0.005)

        def step(images, labels):
            """Trains on one batch."""
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            return loss

        print(f"{len(strategy.devices)} TPUs, {strategy.num_replicas_in_sync} replica(s)")
        for epoch in range(3):
            losses = [strategy.run(step, args=batch) for batch in strategy.distribute(loader)]
            print(f"epoch {epoch}: loss {strategy.reduce('mean', losses[-1]):.4f}")
        (batch,) = strategy.distribute([test_images])
        outputs = strategy.gather(strategy.run(model, args=(batch,)))
    print(f"test accuracy {(outputs.argmax(1) == test_labels).float().mean():.1%}")
