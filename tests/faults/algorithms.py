"""Runs each algorithm of configs/algorithm whole, and killed in its third iteration and resumed.

python algorithms.py NAME ... prints as JSON, by name, in what the two differ.
"""

from pathlib import Path

from kills import Kill, difference, main


def of_algorithm(name: str, folder: Path) -> list[str]:
    return difference(folder, Kill("rollout", 3), {"iteration": 2}, iterations=4, algorithm=name)


if __name__ == "__main__":
    main(of_algorithm)
