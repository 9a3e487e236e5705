/** Where Redis is and how long to wait for it. Public through `Redis`; here so that `resolve` can read them. */

import type * as Duration from "effect/Duration"
import type * as Redacted from "effect/Redacted"
import type { ConnectionOptions } from "node:tls"

/**
 * @category options
 * @since 0.1.0
 */
export interface Address {
  readonly host: string
  readonly port?: number | undefined
}

/**
 * Where Redis is: one of `url`, `path`, `host` and `port`, `sentinels` with `name`, or `cluster`. Without any of them,
 * `localhost:6379`.
 *
 * @category options
 * @since 0.1.0
 */
export interface Options extends Timeouts {
  /**
   * `redis://user:password@host:6379/0`, `rediss://` for TLS, or `unix:///path/of/socket?db=0`. Options given apart from
   * it win over what it says.
   */
  readonly url?: string | Redacted.Redacted<string> | undefined
  readonly host?: string | undefined
  readonly port?: number | undefined
  /** Path of a unix socket. */
  readonly path?: string | undefined
  /** Database number, default 0. A Cluster has only 0. */
  readonly db?: number | undefined
  readonly username?: string | undefined
  readonly password?: Redacted.Redacted<string> | undefined
  /** `true` for TLS with the authorities that Node.js trusts, or options such as `{ ca }`. */
  readonly tls?: boolean | ConnectionOptions | undefined
  readonly sentinels?: ReadonlyArray<Address> | undefined
  /** The name that the Sentinels know the primary by. */
  readonly name?: string | undefined
  readonly sentinelUsername?: string | undefined
  readonly sentinelPassword?: Redacted.Redacted<string> | undefined
  /** TLS to the Sentinels, default as `tls`. */
  readonly sentinelTls?: boolean | ConnectionOptions | undefined
  /** Some nodes of a Redis Cluster; the others are discovered. */
  readonly cluster?: ReadonlyArray<Address> | undefined
  /** From the addresses that the nodes announce, as `host:port`, to those by which they are reached from here. */
  readonly natMap?: Readonly<Record<string, { readonly host: string; readonly port: number }>> | undefined
  /**
   * The name that `CLIENT LIST` shows, default `"lockstep"`; connections of their own add their purpose to it, as in
   * `"lockstep:reader"`. A user without permission for `client|setname` connects without a name.
   */
  readonly clientName?: string | undefined
}

/**
 * @category options
 * @since 0.1.0
 */
export interface Timeouts {
  /** How long connecting and checking the server may take, default 5 seconds. */
  readonly connectTimeout?: Duration.Input | undefined
  /** How long a command may take, default 5 seconds. */
  readonly commandTimeout?: Duration.Input | undefined
}

/**
 * @category options
 * @since 0.1.0
 */
export interface EmbeddedOptions extends Timeouts {
  /**
   * The program to start, default `LOCKSTEP_REDIS_SERVER` of the environment or else `redis-server` or `valkey-server`,
   * whichever is found first on `PATH`.
   */
  readonly binary?: string | undefined
  /** More arguments for it, such as `["--appendonly", "yes"]`. */
  readonly args?: ReadonlyArray<string> | undefined
}
