"""A user's script: the loop is its own, and mtrain distributes, counts, saves and resumes."""

from nets import Net, Rows

import mtrain


def main() -> None:
    with mtrain.session() as session:
        model, optimizer = session.prepare(
            Net,
            optimizer=mtrain.AdamW(
                learning_rate=0.01, weight_decay=0.05, groups=[mtrain.Group(match="bias", weight_decay=0.0)]
            ),
            schedule=mtrain.Cosine(warmup=2),
            clip_norm=1.0,
            accumulate=2,
            ema=0.9,
        )
        for batch in session.batches(Rows(), global_batch=8, epochs=2):
            optimizer.update(model(batch))


if __name__ == "__main__":
    main()
