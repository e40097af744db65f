"""The program that one rank of a job runs."""
