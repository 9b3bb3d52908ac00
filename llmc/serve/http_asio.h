// Boost's Asio and Beast under short names, for the files of http.h alone. Boost is used from its headers: no library
// of it is linked.
#pragma once

#define BOOST_ERROR_CODE_HEADER_ONLY
#define BOOST_SYSTEM_NO_DEPRECATED
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>

namespace weft {

namespace asio = boost::asio;
using boost::system::error_code;
using tcp = asio::ip::tcp;

}  // namespace weft
