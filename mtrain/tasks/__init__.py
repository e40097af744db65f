"""What is particular to a kind of task: data sets, augmentation, evaluation and drawings."""
