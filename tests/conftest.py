"""Tests run in parallel (pytest-xdist; `-n 0` turns it off): few workers, because each one loads torch, and one thread for each and what it starts."""
import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported


def pytest_xdist_auto_num_workers(config):
    return min(os.cpu_count() or 1, 4)
