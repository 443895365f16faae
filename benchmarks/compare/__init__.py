"""The parts of `compare_trl.py`: the work, the two trainers, the floor and the report."""
