"""A model of Keras 3 in a training loop of torch, in one process: `python plain.py`.

In the form of the guide https://keras.io/guides/writing_a_custom_training_loop_in_torch/.
"""

import common
import keras
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def main() -> None:
    """Train, evaluate, and save the weights."""
    keras.utils.set_random_seed(common.SEED)
    train_set, test_set = common.Digits(train=True), common.Digits(train=False)
    model = common.network()
    optimizer = torch.optim.Adam(model.parameters(), lr=common.RATE)
    for epoch in range(common.EPOCHS):
        train_loader = DataLoader(train_set, batch_size=common.GLOBAL_BATCH, sampler=common.order(epoch))
        for images, classes in train_loader:
            loss = cross_entropy(model(images, training=True), classes)
            model.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        predictions = model(test_set.images, training=False)
    print(f"accuracy {common.accuracy(predictions.numpy(), test_set.classes.numpy()):.3f}")
    torch.save({variable.path.partition("/")[2]: variable.value.detach() for variable in model.variables}, "weights.pt")


if __name__ == "__main__":
    main()
