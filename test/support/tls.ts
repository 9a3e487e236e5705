import { Effect } from "effect"
import { execFile } from "node:child_process"
import * as fs from "node:fs/promises"
import * as path from "node:path"
import { promisify } from "node:util"
import { workspace } from "../../src/internal/testing/workspace.ts"

const run = promisify(execFile)

/** PEM texts: an authority, and certificates it signed for the server (localhost, 127.0.0.1) and for a client. */
export interface TlsMaterial {
  readonly ca: string
  readonly cert: string
  readonly key: string
  readonly clientCert: string
  readonly clientKey: string
}

const generate = async (directory: string): Promise<TlsMaterial> => {
  const openssl = (...args: ReadonlyArray<string>) => run("openssl", [...args], { cwd: directory })
  const read = (name: string) => fs.readFile(path.join(directory, name), "utf8")
  const newKey = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
  const sign = async (name: string, subject: string, extension: string) => {
    await fs.writeFile(path.join(directory, `${name}.ext`), extension)
    await openssl("req", ...newKey, "-keyout", `${name}.key`, "-out", `${name}.csr`, "-subj", subject)
    await openssl(
      ...["x509", "-req", "-in", `${name}.csr`, "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial"],
      ...["-out", `${name}.crt`, "-days", "30", "-extfile", `${name}.ext`]
    )
  }
  await openssl(
    ...["req", "-x509", ...newKey, "-keyout", "ca.key", "-out", "ca.crt", "-days", "30"],
    ...["-subj", "/CN=lockstep test authority"]
  )
  await sign("server", "/CN=localhost", "subjectAltName=DNS:localhost,IP:127.0.0.1\n")
  await sign("client", "/CN=client", "extendedKeyUsage=clientAuth\n")
  return {
    ca: await read("ca.crt"),
    cert: await read("server.crt"),
    key: await read("server.key"),
    clientCert: await read("client.crt"),
    clientKey: await read("client.key")
  }
}

const once = workspace.pipe(
  Effect.flatMap(({ directory }) => Effect.promise(() => generate(directory))),
  Effect.scoped
)

let made: Promise<TlsMaterial> | undefined

/** Made once per process with the `openssl` command. */
export const tlsMaterial: Effect.Effect<TlsMaterial> = Effect.promise(() => made ??= Effect.runPromise(once))
