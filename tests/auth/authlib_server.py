"""An authorization server of Authlib, over HTTP on the loopback: its own grants, endpoints and
signatures.

Authlib leaves the storage and HTTP to its users, so only these are written here. Every user agrees
at once.
"""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import msgspec
from aiohttp import web
from authlib.common.security import generate_token
from authlib.oauth2 import AuthorizationServer, OAuth2Request
from authlib.oauth2.rfc6749 import ClientMixin, JsonRequest, OAuth2Payload, TokenMixin, grants
from authlib.oauth2.rfc6750 import BearerTokenGenerator
from authlib.oauth2.rfc7009 import RevocationEndpoint
from authlib.oauth2.rfc7591 import ClientRegistrationEndpoint
from authlib.oauth2.rfc7636 import CodeChallenge
from authlib.oauth2.rfc7662 import IntrospectionEndpoint
from authlib.oauth2.rfc8414 import AuthorizationServerMetadata, get_well_known_url
from authlib.oauth2.rfc9068 import JWTBearerTokenGenerator, JWTRevocationEndpoint
from authlib.oauth2.rfc9207.parameter import IssuerParameter
from joserfc.jwk import ECKey, KeySet
from msgspec import Struct

METHODS = ["none", "client_secret_basic", "client_secret_post"]
SCOPES = ["prices:read", "orders:write"]
RESOURCE_SERVER = "shop-server"  # the client that may introspect tokens

# --- what is stored -------------------------------------------------------------------------------


class User(Struct, frozen=True):
    """A person."""

    name: str

    def get_user_id(self) -> str:
        return self.name


class Client(Struct, ClientMixin):
    """A client, with the metadata of its registration (RFC 7591, section 2)."""

    client_id: str
    secret: str
    metadata: dict[str, Any]

    def get_client_id(self) -> str:
        return self.client_id

    def get_default_redirect_uri(self) -> str | None:
        return None

    def get_allowed_scope(self, scope: str | None) -> str:
        allowed = self.metadata.get("scope", "").split()
        return " ".join(each for each in (scope or "").split() if each in allowed)

    def check_redirect_uri(self, redirect_uri: str) -> bool:
        return redirect_uri in self.metadata.get("redirect_uris", [])

    def check_client_secret(self, client_secret: str) -> bool:
        return client_secret == self.secret

    def check_endpoint_auth_method(self, method: str, endpoint: str) -> bool:
        return bool(method == self.metadata["token_endpoint_auth_method"])

    def check_response_type(self, response_type: str) -> bool:
        return response_type in self.metadata.get("response_types", [])

    def check_grant_type(self, grant_type: str) -> bool:
        return grant_type in self.metadata["grant_types"]


class Code(Struct):
    """An authorization code."""

    code: str
    client_id: str
    user: User
    redirect_uri: str
    scope: str
    code_challenge: str | None
    code_challenge_method: str | None

    def get_redirect_uri(self) -> str:
        return self.redirect_uri

    def get_scope(self) -> str:
        return self.scope


class Token(Struct, TokenMixin):
    """An access token and the refresh token that came with it."""

    access_token: str
    refresh_token: str | None
    client_id: str
    user: User | None
    scope: str
    audience: str
    issued: float
    expires_in: int
    revoked: bool = False
    refresh_revoked: bool = False

    def check_client(self, client: Client) -> bool:
        return self.client_id == client.client_id

    def get_scope(self) -> str:
        return self.scope

    def get_expires_in(self) -> int:
        return self.expires_in

    def is_expired(self) -> bool:
        return self.issued + self.expires_in <= time.time()

    def is_revoked(self) -> bool:
        return self.revoked


# --- grants and endpoints -------------------------------------------------------------------------


class CodeGrant(grants.AuthorizationCodeGrant):
    TOKEN_ENDPOINT_AUTH_METHODS = METHODS

    def save_authorization_code(self, code: str, request: Any) -> None:
        given = request.payload.data
        self.server.codes[code] = Code(
            code=code,
            client_id=request.client.client_id,
            user=request.user,
            redirect_uri=request.payload.redirect_uri,
            scope=request.scope,
            code_challenge=given.get("code_challenge"),
            code_challenge_method=given.get("code_challenge_method"),
        )

    def query_authorization_code(self, code: str, client: Client) -> Code | None:
        found: Code | None = self.server.codes.get(code)
        return found if found is not None and found.client_id == client.client_id else None

    def delete_authorization_code(self, authorization_code: Code) -> None:
        del self.server.codes[authorization_code.code]

    def authenticate_user(self, authorization_code: Code) -> User:
        return authorization_code.user


class RefreshGrant(grants.RefreshTokenGrant):
    TOKEN_ENDPOINT_AUTH_METHODS = METHODS
    INCLUDE_NEW_REFRESH_TOKEN = True

    def authenticate_refresh_token(self, refresh_token: str) -> Token | None:
        found: Token | None = self.server.find(refresh_token)
        return None if found is None or found.refresh_revoked else found

    def authenticate_user(self, refresh_token: Token) -> User | None:
        return refresh_token.user

    def revoke_old_credential(self, refresh_token: Token) -> None:
        refresh_token.refresh_revoked = True


class CredentialsGrant(grants.ClientCredentialsGrant):
    TOKEN_ENDPOINT_AUTH_METHODS = METHODS[1:]


class Introspecting(IntrospectionEndpoint):
    def check_permission(self, token: Token, client: Client, request: Any) -> bool:
        return client.client_id == RESOURCE_SERVER

    def query_token(self, token_string: str, token_type_hint: str | None) -> Token | None:
        found: Token | None = self.server.find(token_string)
        return found

    def introspect_token(self, token: Token) -> dict[str, Any]:
        return {
            "client_id": token.client_id,
            "token_type": "Bearer",
            "scope": token.scope,
            "sub": token.user.name if token.user else token.client_id,
            "aud": token.audience,
            "iss": self.server.issuer,
            "exp": int(token.issued) + token.expires_in,
            "iat": int(token.issued),
        }


class Revoking(RevocationEndpoint):
    CLIENT_AUTH_METHODS = METHODS

    def query_token(self, token_string: str, token_type_hint: str | None) -> Token | None:
        found: Token | None = self.server.find(token_string)
        return found

    def revoke_token(self, token: Token, request: Any) -> None:
        token.revoked = True
        if request.form.get("token_type_hint") != "access_token":
            token.refresh_revoked = True


class JwtRevoking(JWTRevocationEndpoint):
    CLIENT_AUTH_METHODS = METHODS

    def get_jwks(self) -> KeySet:
        keys: KeySet = self.server.keys
        return keys


class Registering(ClientRegistrationEndpoint):
    def authenticate_token(self, request: Any) -> str:
        return "every client may register"

    def get_server_metadata(self) -> dict[str, Any]:
        found: dict[str, Any] = self.server.metadata()
        return found

    def save_client(
        self, client_info: dict[str, Any], client_metadata: dict[str, Any], request: Any
    ) -> Client:
        made = Client(client_info["client_id"], client_info["client_secret"], client_metadata)
        self.server.clients[made.client_id] = made
        return made


# --- HTTP -----------------------------------------------------------------------------------------


class Payload(OAuth2Payload):
    def __init__(self, data: dict[str, str]) -> None:
        self._data = data

    @property
    def data(self) -> dict[str, str]:
        return self._data

    @property
    def datalist(self) -> Any:
        return {name: [value] for name, value in self._data.items()}


class Request(OAuth2Request):
    """A request as Authlib reads it."""

    def __init__(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        query: dict[str, str],
        form: dict[str, str],
    ) -> None:
        super().__init__(method, url, headers=headers)
        self._query = query
        self._form = form
        self.payload = Payload({**query, **form})

    @property
    def args(self) -> dict[str, str]:
        return self._query

    @property
    def form(self) -> dict[str, str]:
        return self._form


class Reply(Struct):
    """An answer of Authlib; its extension for `iss` changes the location."""

    status: int
    body: bytes
    headers: dict[str, str]
    location: str | None


class Server(AuthorizationServer):
    """The authorization server, while it is open.

    Its tokens are JWTs (RFC 9068), or opaque ones for introspection.
    """

    def __init__(self, *, opaque: bool = False) -> None:
        super().__init__(scopes_supported=SCOPES)
        self.issuer = ""
        # Of all tokens: Authlib does not read the parameter `resource` (RFC 8707).
        self.audience = ""
        self.lifetime = 3600
        self.user = User("alice")
        self.clients: dict[str, Client] = {}
        self.codes: dict[str, Code] = {}
        self.tokens: list[Token] = []
        self.asked: list[tuple[str, dict[str, str]]] = []  # path, and query or form
        self.keys = KeySet(
            [ECKey.generate_key("P-256", {"kid": "one", "use": "sig", "alg": "ES256"})]
        )
        self.is_opaque = opaque
        self.methods = METHODS  # how clients authenticate at the token endpoint
        self._runner: web.AppRunner | None = None

    def add_client(
        self, client_id: str, secret: str, method: str, *grant_types: str, redirect_uri: str = ""
    ) -> None:
        """Add a client, as an administrator does."""
        metadata = {
            "token_endpoint_auth_method": method,
            "grant_types": grant_types,
            "redirect_uris": [redirect_uri],
            "response_types": ["code"],
            "scope": " ".join(SCOPES),
        }
        self.clients[client_id] = Client(client_id, secret, metadata)

    def find(self, token: str) -> Token | None:
        return next(
            (each for each in self.tokens if token in (each.access_token, each.refresh_token)), None
        )

    def metadata(self) -> dict[str, Any]:
        """Return the metadata, valid by Authlib's own rules (RFC 8414)."""
        found = AuthorizationServerMetadata(
            {
                "issuer": self.issuer,
                "authorization_endpoint": f"{self.issuer}/authorize",
                "token_endpoint": f"{self.issuer}/token",
                "registration_endpoint": f"{self.issuer}/register",
                "introspection_endpoint": f"{self.issuer}/introspect",
                "revocation_endpoint": f"{self.issuer}/revoke",
                "jwks_uri": f"{self.issuer}/jwks",
                "scopes_supported": SCOPES,
                "response_types_supported": ["code"],
                "grant_types_supported": [
                    "authorization_code",
                    "refresh_token",
                    "client_credentials",
                ],
                "token_endpoint_auth_methods_supported": self.methods,
                "code_challenge_methods_supported": ["S256"],
                "authorization_response_iss_parameter_supported": True,
            }
        )
        found.validate()
        return dict(found)

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.issuer = issuer = f"http://{host}:{port}"
        server = self

        class Jwts(JWTBearerTokenGenerator):
            def get_jwks(self) -> KeySet:
                return server.keys

            def get_audiences(self, client: Client, user: User | None, scope: str) -> str:
                return server.audience

        class Issuing(IssuerParameter):
            def get_issuer(self) -> str:
                return issuer

        def random(**_: object) -> str:
            return str(generate_token(48))

        def lifetime(client: Client, grant_type: str) -> int:
            return self.lifetime

        opaque = BearerTokenGenerator(random, random, lifetime)
        self.register_token_generator(
            "default", opaque if self.is_opaque else Jwts(issuer, "ES256", random, lifetime)
        )
        self.register_grant(CodeGrant, [CodeChallenge(required=True)])
        self.register_grant(RefreshGrant)
        self.register_grant(CredentialsGrant)
        if not self.is_opaque:
            self.register_endpoint(JwtRevoking(issuer))
        for endpoint in (Introspecting, Revoking, Registering):
            self.register_endpoint(endpoint)
        self.register_extension(Issuing())
        self.add_client(RESOURCE_SERVER, "s p+c/ial", "client_secret_basic")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        form = {name: str(value) for name, value in (await request.post()).items()}
        query = dict(request.query)
        self.asked.append((request.path, {**query, **form}))
        if request.path == get_well_known_url(self.issuer):
            return web.json_response(self.metadata())
        if request.path == "/jwks":
            return web.json_response(self.keys.as_dict(private=False))
        if request.path == "/register":
            made = JsonRequest(request.method, str(request.url), request.headers)
            made.payload = Payload(await request.json())
            reply = self.create_endpoint_response("client_registration", made)
        else:
            given = Request(request.method, str(request.url), request.headers, query, form)
            if request.path == "/authorize":
                grant = self.get_consent_grant(given, self.user)
                reply = self.create_authorization_response(given, self.user, grant)
            elif request.path == "/token":
                reply = self.create_token_response(given)
            elif request.path in ("/introspect", "/revoke"):
                name = "introspection" if request.path == "/introspect" else "revocation"
                reply = self.create_endpoint_response(name, given)
            else:
                return web.Response(status=404)
        fields = {**reply.headers, **({"Location": reply.location} if reply.location else {})}
        return web.Response(status=reply.status, body=reply.body, headers=fields)

    # --- what Authlib asks for --------------------------------------------------------------------

    def query_client(self, client_id: str) -> Client | None:
        return self.clients.get(client_id)

    def save_token(self, token: dict[str, Any], request: Any) -> None:
        made = Token(
            access_token=token["access_token"],
            refresh_token=token.get("refresh_token"),
            client_id=request.client.client_id,
            user=request.user,
            scope=token.get("scope", ""),
            audience=self.audience,
            issued=time.time(),
            expires_in=token["expires_in"],
        )
        self.tokens.append(made)

    def create_oauth2_request(self, request: Any) -> Any:
        return request

    def create_json_request(self, request: Any) -> Any:
        return request

    def handle_response(self, status: int, body: Any, headers: list[tuple[str, str]]) -> Reply:
        text = body.encode() if isinstance(body, str) else msgspec.json.encode(body)
        fields = dict(headers)
        return Reply(status, text, fields, fields.pop("Location", None))

    def send_signal(self, name: str, *args: object, **kwargs: object) -> None:
        pass
