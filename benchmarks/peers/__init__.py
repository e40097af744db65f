"""The peers of the benchmarks: loops as a good programmer writes them, on each stack and on other training
libraries."""
