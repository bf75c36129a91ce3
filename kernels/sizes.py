"""Sizes of launches. Triton has functions of these names, which look at each call whether they run in a kernel."""


def cdiv(x: int, y: int) -> int:
    """``x / y`` rounded up."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """The first one that is not less than ``n``."""
    return 1 << (n - 1).bit_length()
