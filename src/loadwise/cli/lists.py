"""Lists on the command line: values separated by commas."""

from loadwise.kernel.errors import ConfigError


def split_names(text: str) -> tuple[str, ...]:
    """Names without the blanks around them; what may be empty or come twice is for whoever asked to say.

    >>> split_names("swe, terminal2")
    ('swe', 'terminal2')
    """
    return tuple(part.strip() for part in text.split(","))


def split_numbers(flag: str, text: str) -> tuple[float, ...]:
    """Numbers.

    >>> split_numbers("--cost-weights", "0,0.5")
    (0.0, 0.5)

    Raises:
        ConfigError: a part is none; the message names the flag and its value.
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{flag} is {text!r}; it must be numbers separated by commas") from error
