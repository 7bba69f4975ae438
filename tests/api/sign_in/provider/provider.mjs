// An OpenID Connect provider for tests: the certified `oidc-provider`, with accounts of any name.
// The first argument is a JSON document; see `oidc_provider.py`.
import { generateKeyPairSync } from "node:crypto";
import http from "node:http";

const told = JSON.parse(process.argv[2]);
if (told.clock_s) {
  const now = Date.now;
  Date.now = () => now() + told.clock_s * 1000;
}
const { default: Provider } = await import("oidc-provider");

const { privateKey } = generateKeyPairSync("rsa", { modulusLength: 2048 });
const key = { ...privateKey.export({ format: "jwk" }), use: "sig", alg: "RS256", kid: told.kid };

const provider = new Provider(told.issuer, {
  clients: [
    {
      client_id: told.client_id,
      client_secret: told.client_secret,
      redirect_uris: told.urls.map((url) => `${url}/sign-in/from-provider`),
      post_logout_redirect_uris: told.urls.map((url) => `${url}/sign-in`),
    },
  ],
  jwks: { keys: [key] },
  cookies: { keys: ["of tests"] },
  claims: { openid: ["sub"], profile: ["preferred_username"], email: ["email", "email_verified"], groups: ["groups"] },
  scopes: ["openid", "profile", "email", "groups"],
  pkce: { required: () => true },
  ttl: { Session: 3600, Grant: 3600, Interaction: 3600, IdToken: 300, AccessToken: 600, AuthorizationCode: 60 },
  findAccount: (_context, id) => ({
    accountId: id,
    claims: () => ({
      sub: id,
      ...(id === "nameless" ? {} : { preferred_username: id }),
      groups: told.groups[id] ?? [],
    }),
  }),
});

http.createServer(provider.callback()).listen(told.port, "localhost", () => console.log("ready"));
