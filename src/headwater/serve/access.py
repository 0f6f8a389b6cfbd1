"""Who asks, and which cached prefixes are theirs: keys, senders, salts.

Without keys everybody is the operator. With keys each one is a tenant: its salt is derived from the server's secret
and the key, so that no two tenants share a block, whatever salts they send.

    key in header -- keyed digest --> tenant: sender, operator?, salt of (key, salt in the body)
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import NamedTuple

from starlette.requests import HTTPConnection

from headwater.cache.account import Viewer
from headwater.cache.extras import frame
from headwater.config import ServerConfig
from headwater.errors import ConfigError
from headwater.serve.errors import ApiError

MAX_KEY_CHARS = 512

SENDER_FORMAT = b"headwater sender 1"
SALT_FORMAT = b"headwater salt 1"
SENDER_CHARS = 16


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. ``sender`` tells callers apart and gives no key away: a keyed digest, "" without keys.
    An ``operator`` may see everything."""

    sender: str
    operator: bool

    @property
    def viewer(self) -> Viewer:
        """The same, as a reader of accounts."""
        return Viewer(self.sender, self.operator)


class GivenKey(NamedTuple):
    """A key, and where it was given in words that do not show it."""

    where: str
    key: str


class Credential(NamedTuple):
    """A key as a request presents it. ``basic``: typed into a browser's own dialogue."""

    key: bytes
    basic: bool


@dataclass(frozen=True)
class _Tenant:
    """What is kept of a key: never the key itself."""

    digest: bytes
    caller: Caller
    salt: hmac.HMAC
    """Over the framed key; each request's salt continues a copy of it."""


def check_keys(given: Sequence[GivenKey]) -> None:
    """Refuse keys that no header can carry, and equal ones. The message never shows a key.

    Raises ConfigError.
    """
    seen: dict[str, str] = {}
    for where, key in given:
        if not key:
            raise ConfigError(f"{where} is empty: leave it out, or give a key")
        if len(key) > MAX_KEY_CHARS:
            raise ConfigError(f"{where} has {len(key)} characters; a key may have at most {MAX_KEY_CHARS}")
        for at, character in enumerate(key, 1):
            if not "!" <= character <= "~" or character == ",":
                raise ConfigError(f"{where} has {_name(character)} as character {at}: {KEY_RULE}")
        if key in seen:
            raise ConfigError(f"{seen[key]} and {where} are equal: each key may be given once, for one tenant")
        seen[key] = where


KEY_RULE = "a key is made of visible ASCII characters without commas, such as letters, digits, - and _"


def _name(character: str) -> str:
    """What a character that no key may have is called."""
    if character in "\r\n\v\f\x1c\x1d\x1e\x85\u2028\u2029":
        return "a line break"
    if character.isspace():
        return "white space"
    if character == ",":
        return "a comma"
    return "a control character" if character < "\x80" else "a character that is not ASCII"


class Access:
    """Who may do what, by the keys of ``config``. Raises ConfigError for keys that cannot be used."""

    def __init__(self, config: ServerConfig) -> None:
        api_keys = [GivenKey(f"API key {i}", key) for i, key in enumerate(config.api_keys, 1)]
        admin_keys = [] if config.admin_key is None else [GivenKey("the admin key", config.admin_key)]
        check_keys(api_keys + admin_keys)
        self.guarded = bool(api_keys or admin_keys)
        """Whether requests need a key."""
        self.has_admin_key = bool(admin_keys)
        self.derives_salts = len(api_keys) + len(admin_keys) > 1 if config.derive_salts is None else config.derive_salts
        """Whether each key has cached prefixes of its own."""
        if self.derives_salts and not self.guarded:
            raise ConfigError(
                "salts are derived from API keys, but there is none: give --api-key, or no --derive-salts"
            )
        if self.derives_salts and config.salt_secret is None:
            raise ConfigError("salts are derived from a secret, but there is none: give --salt-secret-file")
        if config.salt_secret is not None and not self.guarded:
            raise ConfigError("there is a salt secret, but no API key: give --api-key, or no secret")
        self.n_api_keys = len(api_keys)
        secret = config.salt_secret or secrets.token_bytes(32)
        self._blind = secrets.token_bytes(32)
        tenants = [self._tenant(key.key, secret, operator=False) for key in api_keys]
        tenants += [self._tenant(key.key, secret, operator=True) for key in admin_keys]
        self._by_digest = {tenant.digest: tenant for tenant in tenants}
        self._salts = {tenant.caller.sender: tenant.salt for tenant in tenants}

    def _tenant(self, key: str, secret: bytes, *, operator: bool) -> _Tenant:
        raw = key.encode()
        sender = hmac.new(secret, SENDER_FORMAT + frame(raw), hashlib.sha256).hexdigest()[:SENDER_CHARS]
        salt = hmac.new(secret, SALT_FORMAT + frame(raw), hashlib.sha256)
        return _Tenant(self._digest(raw), Caller(sender, operator), salt)

    def _digest(self, key: bytes) -> bytes:
        """Equal for equal keys only, and otherwise unforeseeable: looking it up takes no longer for a wrong key
        that begins as a right one does, nor with many keys."""
        return hmac.digest(self._blind, key, "sha256")

    # ---- who asks ---------------------------------------------------------------------------------

    def caller(self, request: HTTPConnection, *, allow_basic: bool = True) -> Caller:
        """Who sent ``request``. Raises ApiError 401 without a key, or with one that is none of the server's."""
        if not self.guarded:
            return Caller("", operator=True)
        credential = presented(request)
        digest = self._digest(credential.key)
        tenant = self._by_digest.get(digest)
        if tenant is None or not hmac.compare_digest(tenant.digest, digest) or (credential.basic and not allow_basic):
            raise unauthorized("this API key is not known here")
        return tenant.caller

    def operator(self, request: HTTPConnection, *, allow_basic: bool = True) -> Caller:
        """The operator who sent ``request``. Raises ApiError 401 as ``caller`` does, 403 for a tenant."""
        caller = self.caller(request, allow_basic=allow_basic)
        if not caller.operator:
            how = "send the admin key" if self.has_admin_key else "start the server with --admin-key, and send that key"
            raise ApiError(HTTPStatus.FORBIDDEN, f"this is for the server's operator: {how}", code="admin_key_required")
        return caller

    # ---- whose prefixes ---------------------------------------------------------------------------

    def salt(self, caller: Caller, body_salt: str | None) -> str | None:
        """The salt that a request of ``caller`` runs under, from the one in its body (None: it has none).

        Derived salts are HMAC-SHA256(secret, tag, framed key, framed body salt or a mark for none) in hexadecimal: of
        another key, or of another body salt (an empty one is not none), another one.
        """
        if not self.derives_salts:
            return body_salt
        derived = self._salts[caller.sender].copy()
        # surrogatepass: a salt is any string that JSON can carry, lone surrogates included
        derived.update(b"-" if body_salt is None else b"S" + frame(body_salt.encode("utf-8", "surrogatepass")))
        return derived.hexdigest()


def presented(request: HTTPConnection) -> Credential:
    """The one key that ``request`` sends, as Authorization: Bearer, x-api-key, or a browser's Authorization: Basic
    (any name, the key as password). Raises ApiError 401 without one, or with several that differ."""
    bearers, plain, basic = set(), set(), set()
    for name, value in request.scope["headers"]:
        if name == b"authorization":
            scheme, _, rest = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                bearers.add(rest.strip())
            elif scheme.lower() == b"basic":
                basic.add(_password(rest.strip()))
        elif name == b"x-api-key":
            plain.add(value.strip())
    sent = (bearers | plain) or basic  # Basic beside a key may be for a proxy on the way
    if not sent:
        raise unauthorized("an API key is needed: send the header Authorization: Bearer KEY")
    if len(sent) > 1:
        raise unauthorized("several API keys that differ were sent: send one")
    return Credential(sent.pop(), basic=not (bearers | plain))


def _password(encoded: bytes) -> bytes:
    """What follows the name in Basic credentials; nothing where they cannot be read."""
    try:
        return base64.b64decode(encoded, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def unauthorized(message: str) -> ApiError:
    return ApiError(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key")
