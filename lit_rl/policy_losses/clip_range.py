"""What the distances of a clip may be."""


def check_clip_range(clip_low: float, clip_high: float, example: float = 0.2) -> None:
    """Refuse a clip of the ratio to [1 - clip_low, 1 + clip_high] that makes no sense.

    Args:
        clip_low: how far the ratio may fall below 1.
        clip_high: how far the ratio may rise above 1.
        example: a distance that is usual for the loss.

    Raises:
        ValueError: unless clip_low is in (0, 1] and clip_high is above 0.

    Example:
        >>> check_clip_range(clip_low=0.2, clip_high=-0.2)
        Traceback (most recent call last):
        ValueError: clip_high must be above 0, for example 0.2, not -0.2
    """
    if not 0 < clip_low <= 1:
        raise ValueError(f"clip_low must be in (0, 1], for example {example}, not {clip_low}")
    if not clip_high > 0:
        raise ValueError(f"clip_high must be above 0, for example {example}, not {clip_high}")
