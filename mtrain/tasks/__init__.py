"""Everything particular to one kind of task: data sets, augmentation, evaluation and drawings."""
