"""Signatures of a client: assertions (RFC 7523) and proofs of possession (DPoP, RFC 9449). They need `wirecall[auth]`."""

import base64
import hashlib
import secrets
import time
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from wirecall.errors import UsageError

LIFETIME = 300  # seconds of an assertion


def _jwt() -> ModuleType:
    try:
        import jwt
    except ImportError:
        raise UsageError("PyJWT is not installed.", "keys and DPoP need it", "pip install 'wirecall[auth]'") from None
    return jwt


def client_assertion(key: str, algorithm: str, client_id: str, audience: str) -> str:
    """Return the text by which a client authenticates with its private key (PEM) at a token endpoint."""
    now, jwt = int(time.time()), _jwt()
    claims = {"iss": client_id, "sub": client_id, "aud": audience, "iat": now, "exp": now + LIFETIME}
    try:
        text: str = jwt.encode({**claims, "jti": secrets.token_urlsafe(16)}, key, algorithm=algorithm)
    except (ValueError, TypeError, NotImplementedError, jwt.PyJWTError) as error:  # without the key itself
        why = f"{type(error).__name__} with {algorithm}"
        raise UsageError("The client's key cannot sign.", why, "give a private key as PEM, and its algorithm=") from None
    return text


class DpopKey:
    """A key that a token is bound to: each request proves that the client has it."""

    def __init__(self, pem: str | None = None) -> None:
        self._jwt: Any = _jwt()
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        if pem is None:
            self._key: Any = ec.generate_private_key(ec.SECP256R1())
        else:
            self._key = serialization.load_pem_private_key(pem.encode(), None)
        form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        self.pem: str = self._key.private_bytes(*form).decode()
        self._jwk = self._jwt.algorithms.ECAlgorithm.to_jwk(self._key.public_key(), as_dict=True)

    def proof(self, method: str, url: str, *, nonce: str | None = None, token: str | None = None) -> str:
        """Return the proof for one request; each has an id of its own."""
        claims: dict[str, Any] = {
            "jti": secrets.token_urlsafe(16),
            "htm": method,
            "htu": urlsplit(url)._replace(query="", fragment="").geturl(),
            "iat": int(time.time()),
        }
        if nonce is not None:
            claims["nonce"] = nonce
        if token is not None:
            claims["ath"] = base64.urlsafe_b64encode(hashlib.sha256(token.encode()).digest()).rstrip(b"=").decode()
        text: str = self._jwt.encode(claims, self._key, algorithm="ES256", headers={"typ": "dpop+jwt", "jwk": self._jwk})
        return text
