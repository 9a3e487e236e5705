/** Every request, with this fault on its way. */
import { executed } from "./matrix/executed.ts"

executed("garbleReply")
