/** How long a topic keeps events, as its actor receives it. */

import { lasting, millis, whole } from "../hold/place.ts"
import type { Options } from "./api.ts"

const limited = (value: number, what: string): number =>
  value === Number.POSITIVE_INFINITY ? 0 : whole(value, what, Number.MAX_SAFE_INTEGER)

export const limitsOf = <A>({ dedupe, retention }: Options<A>) =>
  [
    limited(retention?.length ?? 100_000, "retention.length"),
    limited(retention?.bytes ?? Number.POSITIVE_INFINITY, "retention.bytes"),
    lasting(retention?.age ?? "1 day", "retention.age"),
    lasting(retention?.abandon ?? "7 days", "retention.abandon"),
    millis(dedupe ?? "10 minutes", "dedupe"),
    retention?.protect ?? true
  ] as const
