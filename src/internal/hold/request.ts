/** The one way to ask a partition actor for something that is not held: with a deadline, and an answer in every case. */

import * as Effect from "effect/Effect"
import type { CoordinatorError } from "../actor/errors.ts"
import type { Requests } from "../actor/lua.ts"
import type { Request } from "../actor/sending.ts"
import type { Session } from "../actor/session.ts"
import { coordinatorError, failed, type Transport, type Verb } from "../actor/transport.ts"
import { mostStale } from "./claim.ts"
import type { Hold } from "./hold.ts"
import type { Tenancy } from "./tenancy.ts"

/** The target of a request: a place is one. */
export interface Target {
  readonly tenancy: Tenancy
  /** The hash of the resource. */
  readonly key: string
}

/** The target of a hold. */
export const targetOf = ({ claim, keeper }: Hold): Target => ({ tenancy: keeper as Tenancy, key: claim.place.key })

type ReplyOf<V extends Verb> = Requests[V]["reply"]

export interface RequestOptions<A, V extends Verb = Verb> {
  /** The hashes of the other resources, if it is about several of one kind. */
  readonly others?: ReadonlyArray<string> | undefined
  /** The session that it is bound to. */
  readonly session?: Session | undefined
  /**
   * Its result when the session was lost before an answer; `sent` says whether it may have been executed. Without this, the next
   * session makes the request again.
   */
  readonly moot?: ((sent: boolean) => A) | undefined
  /** Called before it is sent: its result instead, if it is too late for that. */
  readonly lapsed?: (() => A | undefined) | undefined
  /** Called with the reply, in order with the session's events, also when the fiber that asked was interrupted meanwhile. */
  readonly answered?: ((reply: ReplyOf<V>) => void) | undefined
  /** Called when it is not answered, also later than the fiber that asked; `sent` says whether it may have been executed. */
  readonly refused?: ((error: CoordinatorError, sent: boolean) => void) | undefined
  /** Executed with it, in one step. */
  readonly following?: ReadonlyArray<Request> | undefined
  /** How many requests of a batch it counts for. Default 1. */
  readonly weight?: number | undefined
  /** It is a part of a wait or of a hold: while Redis is away it goes on, rather than fails. */
  readonly waits?: boolean | undefined
  /**
   * While Redis is away it fails as others do, and is executed later all the same: its `answered` is called. The caller of the end of
   * something waits for `Channel.patience` at most.
   */
  readonly persists?: boolean | "end" | undefined
  /** It was asked before, so it is no new work: however many requests wait, it is not refused. */
  readonly again?: boolean | undefined
}

/**
 * Executes a request exactly once, and answers its reply. While Redis is away it fails after the coordinator's
 * `requestTimeout`; if it has been sent by then, it may be executed all the same. So may one whose fiber is interrupted.
 */
export const request = <V extends Verb, A = never>(
  target: Target,
  verb: V,
  args: Requests[V]["args"],
  options: RequestOptions<A, V> = {}
): Effect.Effect<ReplyOf<V> | A, CoordinatorError> =>
  Effect.callback((resume) => {
    const { key, tenancy: { channel, kernel } } = target
    const { again, answered, following, lapsed, moot, others, persists = false, refused, session, waits = false } =
      options
    if (kernel.isClosing()) return resume(Effect.fail(channel.closedError()))
    const asking = {
      verb,
      key,
      others,
      args,
      session,
      urgent: again,
      following,
      whole: following !== undefined,
      weight: (options.weight ?? 1) + (following?.length ?? 0),
      lapses: lapsed && (() => {
        const result = lapsed()
        return result === undefined ? undefined : () => resume(Effect.succeed(result))
      }),
      moot: moot && ((sent: boolean) => resume(Effect.succeed(moot(sent)))),
      settle: (reply: ReplyOf<V>) => {
        answered?.(reply)
        resume(Effect.succeed(reply))
      },
      fail: (error: CoordinatorError, sent: boolean) => {
        refused?.(error, sent)
        resume(Effect.fail(error))
      },
      expire: waits ? undefined : (error: CoordinatorError) => {
        asking.cancelled = persists === false
        resume(Effect.fail(error))
      },
      cancelled: false
    }
    channel.outbox.request<V>(asking)
    if (persists === "end") channel.whenImpatient(() => resume(Effect.fail(kernel.transport.late(key))))
    if (persists !== false) return
    return Effect.sync(() => {
      if (!channel.outbox.withdraw(asking)) asking.cancelled = true
    })
  })

/** Reads a plain key of the partition, with the deadline and the errors of a question. */
export const read = ({ tenancy: { partition } }: Target, key: string): Effect.Effect<string | null, CoordinatorError> =>
  Effect.callback((resume) =>
    partition.reads.read(key, {
      settle: (value) => resume(Effect.succeed(value)),
      fail: (error) => resume(Effect.fail(error))
    })
  )

type Fresh<R> = Exclude<R, readonly ["stale"]>

/**
 * Asks until no session that ended long ago falsifies the answer: each that does is reaped first. After some of them,
 * `anyway` is true, and the answer is taken as it is.
 */
export const fresh = <R extends readonly [tag: string, ...rest: any], E>(
  target: Target,
  ask: (anyway: boolean) => Effect.Effect<R, E>
): Effect.Effect<Fresh<R>, E> => {
  const attempt = (stale: number): Effect.Effect<Fresh<R>, E> =>
    Effect.flatMap(ask(stale === mostStale), (reply) =>
      reply[0] === "stale"
        ? Effect.andThen(Effect.promise(() => target.tenancy.partition.reaper.tickInTime()), attempt(stale + 1))
        : Effect.succeed(reply as Fresh<R>))
  return attempt(0)
}

/**
 * Asks about the state of a resource, which changes nothing; the answer is `fresh`. While Redis is away it fails after the
 * coordinator's `requestTimeout`.
 */
export const question = <V extends Verb>(
  target: Target,
  verb: V,
  args: Requests[V]["args"]
): Effect.Effect<Fresh<ReplyOf<V>>, CoordinatorError> =>
  fresh(target, (anyway) =>
    Effect.tryPromise({
      try: () => inspect(target, verb, args, anyway) as Promise<ReplyOf<V>>,
      catch: (cause) => coordinatorError(cause, target.key)
    }))

/**
 * As `question`, about a resource that this process has joined. If Redis does not know it, it may have lost its data, which no
 * connection reports: the session asks, and the question is asked again behind that.
 */
export const memberQuestion = <V extends Verb>(
  target: Target,
  verb: V,
  args: Requests[V]["args"]
): Effect.Effect<Fresh<ReplyOf<V>>, CoordinatorError> =>
  Effect.flatMap(question(target, verb, args), (reply) =>
    (reply as readonly [string])[0] === "missing"
      ? Effect.andThen(renewed(target), question(target, verb, args))
      : Effect.succeed(reply))

// As far as Redis can be reached.
const renewed = ({ tenancy: { channel } }: Target): Effect.Effect<void> =>
  Effect.promise(() => new Promise((resolve) => void channel.opened(() => resolve()).then(resolve, () => resolve())))

/**
 * Asks Redis itself about a plain key of the partition, which is the first argument, with the deadline, the bound and the errors of a
 * question.
 */
export const look = (
  target: Target,
  command: string,
  args: ReadonlyArray<string | number>
): Effect.Effect<unknown, CoordinatorError> =>
  Effect.tryPromise({
    try: () => asked(target, (transport) => transport.read(command, args)),
    catch: (cause) => coordinatorError(cause, target.key)
  })

const asked = async <A>(
  { key, tenancy: { kernel: { refusal, transport }, partition } }: Target,
  ask: (transport: Transport) => Promise<A>
): Promise<A> => {
  const refused = partition.questions.begin(key)
  if (refused !== undefined) throw refused
  return await transport.answered(key, refusal, () => ask(transport)).finally(() => partition.questions.end())
}

const inspect = async (
  target: Target,
  verb: Verb,
  args: ReadonlyArray<string | number | boolean>,
  anyway: boolean
) => {
  const { key, tenancy: { partition } } = target
  const { replies: [reply] } = await asked(
    target,
    (transport) => transport.inspect(transport.addressOf(partition.prefix, ""), { verb, key, args }, anyway)
  )
  if (reply![0] === "failed") throw failed(verb, String(reply![1]))
  return reply!
}
