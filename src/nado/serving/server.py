"""The application behind uvicorn."""

import ipaddress
import logging
import signal
import threading

from nado.errors import InputError, MissingPackageError
from nado.serving.engine import Engine, same_in_any_place
from nado.serving.jobs import ServingConfig
from nado.serving.models import ServedModel

log = logging.getLogger(__name__)

_MOST_CONNECTIONS = 2048
_FINISH_SECONDS = 60  # that running requests have when the server is told to end


def serve(
    model: ServedModel,
    config: ServingConfig | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
) -> None:
    """Serve until told to end; running requests are finished first."""
    require_packages()
    import uvicorn

    from nado.serving.api import make_app

    local = is_loopback(host)
    if token is not None and len(token) < 16:
        raise InputError("a token of at least 16 characters", f"one of {len(token)}", "Make a longer one.")
    if not local and token is None:
        log.warning("anyone who can reach %s can use this server: no token is asked for", host)
    engine = Engine(model, config)
    if model.base.device.type == "cpu" and not same_in_any_place(engine):
        log.warning("texts may depend on other requests in the last digits: set MKL_CBWR=AUTO,STRICT")
    if threading.current_thread() is threading.main_thread():
        # uvicorn finishes what is running and then raises the signal again: that is no failure.
        signal.signal(signal.SIGTERM, lambda number, frame: None)
    uvicorn.run(
        make_app(engine, token=token, local_only=local),
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_graceful_shutdown=_FINISH_SECONDS,
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_packages() -> None:
    """Say what to install where the web server is not."""
    from importlib.util import find_spec

    for package in ("fastapi", "uvicorn", "pydantic"):
        if find_spec(package) is None:
            raise MissingPackageError(package, "serve", "nado serve")
