// Whether results on stdout may have colours. Those of messages are the business of log.h.
#pragma once

namespace weft {

// stdout is a terminal that is not TERM=dumb, and neither --color never nor NO_COLOR forbids colours.
bool stdout_color();

}  // namespace weft
