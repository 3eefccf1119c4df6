"""Base sampling: what the base writes when nobody asks for anything."""

from nado.baselines.method import Method, Provisions, Sampled, Settings, System


class BaseSampling(Method):
    """Texts drawn from p, with its declared warpers."""

    name = "base sampling"
    source = "the base itself"

    def prepare(self, given: Provisions, settings: Settings) -> System:
        """The base."""
        return Sampled(given.base, given.rows)
