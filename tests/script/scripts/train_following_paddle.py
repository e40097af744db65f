"""A teacher that follows a student in Paddle, checked against numpy in each update."""

import numpy as np
import paddle
from points import Plain

import mtrain


class Net(paddle.nn.Layer):
    """A layer and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = paddle.nn.Sequential(paddle.nn.Linear(8, 2), paddle.nn.BatchNorm1D(2))

    def forward(self, inputs):
        return self.layers(inputs)


def arrays(layer):
    """Return copies of the parameters without running statistics."""
    return [x.numpy().copy() for name, x in layer.named_parameters() if name.rpartition(".")[2] in ("weight", "bias")]


def main() -> None:
    """Train."""
    with mtrain.session() as session:
        student, optimizer = session.prepare(
            Net, optimizer=mtrain.SGD(learning_rate=0.1), name="student", precision="fp64"
        )
        teacher, _ = session.prepare(Net, name="teacher")
        assert any((a != b).any() for a, b in zip(arrays(student), arrays(teacher), strict=True))
        session.follow(teacher, student)
        assert all((a == b).all() for a, b in zip(arrays(student), arrays(teacher), strict=True))
        for inputs, targets in session.batches(Plain(24, 0), global_batch=8, updates=3):
            before = arrays(teacher)
            optimizer.update(paddle.nn.functional.cross_entropy(student(inputs), targets) + 0 * teacher(inputs).sum())
            assert all((a == b).all() for a, b in zip(arrays(teacher), before, strict=True))
            session.follow(teacher, student, 0.25)
            for own, old, other in zip(arrays(teacher), before, arrays(student), strict=True):
                np.testing.assert_allclose(own, old + 0.25 * (other - old), rtol=0, atol=1e-15)
                assert not np.array_equal(own, old)
            for name, own in teacher.state_dict().items():
                assert not name.endswith(("_mean", "_variance")) or (own == student.state_dict()[name]).all(), name


if __name__ == "__main__":
    main()
