"""The tests that `make quick` leaves out: those that take more than about three seconds.

{file below tests/: the names of its slow tests, of a parametrized one with or without its
parameters}. tests/conftest.py gives them the marker `slow`. Seconds were taken on one core, with
everything imported.
"""

SLOW: dict[str, tuple[str, ...]] = {
    "exercises/test_check.py": (
        "test_in_a_real_kernel_a_check_prints_one_line_and_no_result",
        "test_without_assertions_nothing_passes",
    ),
}
