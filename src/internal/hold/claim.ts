/** Claims to hold, wait for or observe a resource, and their outcomes: the data, and nothing that talks to Redis. */

import type { CoordinatorError } from "../actor/errors.ts"
import type { Home } from "../actor/home.ts"
import type { kinds, Requests } from "../actor/lua.ts"
import type { Request } from "../actor/sending.ts"
import type { LossReason, Session } from "../actor/session.ts"
import type { Verb } from "../actor/transport.ts"
import { describe } from "./loss.ts"

export type Kind = keyof typeof kinds

/** Why something is not held any more. */
export type EndReason = LossReason | "maxHold" | "resigned" | "revoked"

/** The requests that can grant something, or let it be observed. */
export type ClaimVerb = {
  [V in Verb]: Extract<Requests[V]["reply"], readonly ["granted" | "joined" | "queued", ...any]> extends never ? never
    : V
}[Verb]

/** The requests that release something. */
export type LeaveVerb = {
  [V in Verb]: Requests[V]["reply"] extends readonly [tag: "released" | "absent" | "left"] ? V : never
}[Verb]

export type ClaimReply = Requests[ClaimVerb]["reply"]

export type Argument = string | number | boolean

/** The object of a claim. */
export interface Resource {
  readonly kind: Kind
  readonly name: string
  /** Its hash. */
  readonly key: string
  /** Of which server and namespace, as its coordinator knows them. */
  readonly home: Home
  readonly namespace: string
}

/** A request to hold or to join, as a primitive makes it. */
export interface Claim {
  readonly place: Resource
  readonly verb: ClaimVerb
  /**
   * The arguments behind the id, made for each request. With `anyway` the actor ignores expired sessions that could falsify its answer.
   * `again` says that the claim may have been requested before in this session.
   */
  readonly args: (anyway: boolean, again: boolean) => ReadonlyArray<Argument>
  /** Releases it, or leaves its queue. Default `session.leave`. */
  readonly leave?: LeaveVerb | undefined
  /** Its process may keep it when it has released it. Default `false`. */
  readonly cached?: boolean | undefined
  /** What Redis shows of it: a claim that brings something else does not take over what is kept. */
  readonly brings?: string | undefined
  /** How long it queues at most, in milliseconds, where it does not wait: then it is refused as busy. */
  readonly patience?: number | undefined
  /** The caller does not wait until Redis has released it. Default `false`. */
  readonly background?: boolean | undefined
  /** It does not wait for others: while Redis is away, it fails. Default `false`. */
  readonly question?: boolean | undefined
  /** It is asked again once in a lease, so that a resource that was deleted is noticed: for claims that are few. Default `false`. */
  readonly verified?: boolean | undefined
}

/** The outcomes of a claim that is not granted. */
export type Refusal =
  | Exclude<ClaimReply, readonly ["granted" | "joined" | "kept" | "queued" | "stale", ...any]>
  /** By this side: the object that it depends on is closed. */
  | readonly [tag: "closed"]

export type Outcome =
  | Refusal
  | readonly [tag: "granted"]
  | readonly [tag: "failed", error: CoordinatorError]

/**
 * How often a claim is requested again because an expired session could falsify the answer. Each time up to 16 of them are reaped. Then the
 * answer counts as it is. Redis sets aside a session that cannot be reaped, so no claim should come to this bound.
 */
export const mostStale = 100

/** The object that releases a claim. */
export interface Keeper {
  readonly release: (entry: Entry, done: () => void) => void
}

const ignore = () => {}

/** A claim on its way: from before it is asked for until it is over. */
export abstract class Entry {
  /**
   * - `idle`: there is no session to ask under.
   * - `asked`: the answer is under way.
   * - `queued`: it waits for others.
   * - `held`: granted, or joined.
   * - `done`: released, refused, or lost.
   */
  state: "idle" | "asked" | "queued" | "held" | "done" = "idle"
  session: Session | undefined = undefined
  /** It has been asked for in this session, so Redis may know it. */
  known = false
  /** It had to wait for others, in any session. */
  waited = false
  /** Redis has answered in this session that it waits. */
  queued = false
  /** It has to ask again: when the reply comes that it waits for, or with the next heartbeat. */
  again = false
  /** So often, Redis is being asked whether it still holds. */
  verifying = 0
  /** How often an expired session stood in the way. */
  stale = 0
  /** When it was asked for, by the monotonic clock. */
  askedAt = 0
  request: Request<ClaimVerb> | undefined = undefined
  /** Executed with its release, if it was held until then. */
  following: Array<Request> | undefined = undefined
  releasing: { readonly also: (done: () => void) => void } | undefined = undefined
  /** Called once, with its outcome. */
  settle: (outcome: Outcome) => void = ignore
  /** Called when it is asked for again while it waits: its session is lost, or Redis says so. A field would cost every hold memory. */
  declare repeated?: (() => void) | undefined

  /** One that takes over what its process has kept has the id of that. */
  id: string
  readonly claim: Claim
  readonly keeper: Keeper

  constructor(id: string, claim: Claim, keeper: Keeper) {
    this.id = id
    this.claim = claim
    this.keeper = keeper
  }
}

/** The subject of an error or a log line about a claim. */
export const nameOf = ({ claim: { place: { kind, name, namespace } } }: Entry): string =>
  describe(kind, name, namespace)
