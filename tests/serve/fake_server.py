"""A whole server on the fake core, as a process: ``python -m tests.serve.fake_server MODEL PORT``."""

from __future__ import annotations

import sys

from headwater.config import EngineConfig, ModelConfig, ServerConfig
from headwater.errors import HeadwaterError
from headwater.serve.access import Access
from headwater.serve.run import Announce, bind, serve
from tests.serve.fake_core import ByteTokenizer, settings


def access_of(asked: dict[str, str]) -> Access:
    """The keys in a model's name: ``fake?keys=alice.bob&admin=root&derive=0``."""
    keys = tuple(asked["keys"].split(".")) if "keys" in asked else ()
    return Access(
        ServerConfig(
            api_keys=keys,
            admin_key=asked.get("admin"),
            derive_salts=bool(int(asked["derive"])) if "derive" in asked else None,
            salt_secret=b"a secret of the tests" if keys else None,
        )
    )


def main() -> None:
    model, port = sys.argv[1:]
    try:
        serve(
            EngineConfig(model=ModelConfig(model=model)),
            bind("127.0.0.1", int(port)),
            lambda: ByteTokenizer(has_template="no_template" not in settings(model)),
            served_name="fake",
            access=access_of(settings(model)),
            core="tests.serve.fake_core:build_core",
            announce=Announce(ready=lambda front, url: print(f"ready {url}", flush=True)),
        )
    except HeadwaterError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
