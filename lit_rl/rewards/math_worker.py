"""Compares answers in a process of its own; `MathEquivalence` runs this file as a script.

A model can write `$10^{10^{10}}$`, which keeps sympy busy in code that no signal interrupts: only
a process can be ended. The script imports nothing of lit_rl, so that it starts quickly.
"""

import faulthandler
import json
import logging
import os
import sys

MARKS = ("$", r"\boxed", r"\(", r"\[")


def verdict(answer: str, response: str) -> str:
    """Compare a response with a reference answer.

    Args:
        answer: one expression; one without a mark of LaTeX mathematics is read as LaTeX.
        response: a text that holds numbers, or LaTeX between marks.

    Returns:
        "equal"; "different", also for a response without an expression; "unreadable answer"; or
        "failed" with the reason if the two could not be compared.
    """
    from math_verify import parse, verify

    marked = answer if any(mark in answer for mark in MARKS) else f"${answer}$"
    expected = parse(marked, fallback_mode="no_fallback", parsing_timeout=None)
    if not expected:
        return "unreadable answer"
    given = parse(response, fallback_mode="no_fallback", parsing_timeout=None)
    try:
        equal = verify(expected, given, timeout_seconds=None, raise_on_error=True)
    except Exception as error:
        return f"failed: {type(error).__name__}"
    return "equal" if equal else "different"


def main(timeout_seconds: float) -> None:
    """Answer each line of standard input, [answer, response] in JSON, with one line.

    Args:
        timeout_seconds: the process ends itself when one comparison takes longer.
    """
    # The folder of this script holds modules of lit_rl, not what other packages import.
    del sys.path[0]
    logging.disable()
    replies, sys.stdout = sys.stdout, sys.stderr
    verdict("1", "1")
    print("ready", file=replies, flush=True)
    with open(os.devnull, "w") as nowhere:
        for line in sys.stdin:
            faulthandler.dump_traceback_later(timeout_seconds, exit=True, file=nowhere)
            reply = verdict(*json.loads(line))
            faulthandler.cancel_dump_traceback_later()
            print(reply, file=replies, flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
