// Removes the last build, so that a module that was renamed or deleted is not published.
import { rmSync } from "node:fs"

rmSync(new URL("../dist", import.meta.url), { recursive: true, force: true })
