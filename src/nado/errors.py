"""Errors a user can act on: each says what was expected, what was found and what to do."""


class NadoError(Exception):
    """The root of every error nado raises on purpose.

    The three parts are kept apart so that a command line can print them on one line, a server can
    send them as JSON and a test can check them word for word.
    """

    def __init__(self, expected: str, found: str, hint: str) -> None:
        super().__init__(expected, found, hint)
        self.expected = expected
        self.found = found
        self.hint = hint

    def __str__(self) -> str:
        return f"expected {self.expected}; found {self.found}. {self.hint}"


class InputError(NadoError, ValueError):
    """An argument, a file or a config value is not what the function asks for."""


class MismatchError(NadoError, ValueError):
    """Two things that must belong together do not: a guide and a base, a manifest and a run."""


class CoverageError(NadoError, ValueError):
    """A proposal cannot reach part of what p can write, so its weights would be wrong."""


class InfeasibleError(NadoError, ValueError):
    """What was asked for cannot be reached from this base: R(x) is 0 or 1 where it must not be."""


class OracleError(NadoError, RuntimeError):
    """An oracle raised, hung, or returned something other than one boolean a text."""


class StorageError(NadoError, OSError):
    """A file could not be read or written: disk full, a damaged shard, another run's folder."""


class MissingPackageError(NadoError, ImportError):
    """A feature needs a package that is not installed."""

    def __init__(self, package: str, extra: str, feature: str) -> None:
        super().__init__(
            f"the package {package} for {feature}",
            "that it is not installed",
            f"Install it with: pip install 'nado-lm[{extra}]'",
        )


def unloadable(name: str, error: Exception) -> InputError:
    """What to say of a base that transformers cannot load: it explains at length, so its first line."""
    reason = str(error).strip().split("\n")[0][:200].rstrip(".")
    return InputError(
        f"a base that can be loaded as {name!r}",
        f"the error: {reason}",
        "Give a folder or .gguf file that is there, or a hub name that can be reached.",
    )


def require_at_least(least: int, **sizes: int | None) -> None:
    """Refuse sizes below `least`; those that were not given are None."""
    for name, size in sizes.items():
        if size is not None and size < least:
            raise InputError(f"{name} of at least {least}", f"{size}", f"Ask for {least} or more.")
