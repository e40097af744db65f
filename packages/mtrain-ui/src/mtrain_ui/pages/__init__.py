"""Pages about runs: ``report.html`` of one run, and a read-only web page over a folder of runs."""
