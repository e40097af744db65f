"""An update whose gradient is not finite is skipped, counted, told; too many in a row end the job with a reason."""

import json


def test_a_rate_that_explodes_ends_with_one_clear_error(runner):
    values = ["optimizer.rule=sgd", "optimizer.learning_rate=1e30", "schedule.warmup=null", "train.clip_norm=null"]
    arguments = [*runner.arguments(name="exploding", backend="solo", ranks=1), "-o", *values, "train.max_nonfinite=3"]
    code, output = runner.run(arguments)
    assert code == 1, output
    assert "not finite in 3 updates in a row" in output
    assert "the update was skipped" in output
    assert "Traceback" not in output
    rows = [json.loads(line) for line in (runner.run_folder("exploding") / "metrics.jsonl").read_text().splitlines()]
    assert max(row["skipped_updates"] for row in rows if row["kind"] == "update") >= 2
