/** A worker process as it knows itself: its settings, and its line to the parent. */
import { Effect, Schema } from "effect"
import * as protocol from "./protocol.ts"
import * as store from "./store.ts"

export const settings = Schema.decodeUnknownSync(protocol.SettingsArgument)(process.argv[2])
export const keys = store.keysOf(settings.namespace)

export const tell = (event: protocol.Event) =>
  Effect.flatMap(protocol.News, (news) => Effect.orDie(news.publish(event)))
