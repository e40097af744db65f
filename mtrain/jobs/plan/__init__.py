"""The plan of a job: who takes part, with which means, what each host runs, and the numbers that follow from the spec."""
