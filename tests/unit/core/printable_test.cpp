#include "kvevict/core/printable.hpp"

#include <doctest/doctest.h>

#include <string>

using namespace kvevict;

TEST_CASE("printable: one line of valid UTF-8 in which everything is seen") {
  CHECK(printable("snapkv(window=32) \\ 'ü' 漢 🙂") == "snapkv(window=32) \\ 'ü' 漢 🙂");
  CHECK(printable("a\nkvevict: error: forged\r\t") == "a\\nkvevict: error: forged\\r\\t");
  CHECK(printable("\x1b[31mred\x07\x7f") == "\\x1b[31mred\\x07\\x7f");
  CHECK(printable(std::string(1, '\0')) == "\\x00");
  CHECK(printable("\xc2\x9b"
                  "31m") == "\\u{9b}31m");  // a control of one code point
  CHECK(printable("\u202e"
                  "evil\u2066\ufeff\u200b") == "\\u{202e}evil\\u{2066}\\u{feff}\\u{200b}");
  CHECK(printable("\U000e0041") == "\\u{e0041}");
  CHECK(printable("bad\xff\xfe") == "bad\\xff\\xfe");
  CHECK(printable("\xc0\xaf\xe0\x80\xaf") == "\\xc0\\xaf\\xe0\\x80\\xaf");                    // overlong
  CHECK(printable("\xed\xa0\x80\xf4\x90\x80\x80") == "\\xed\\xa0\\x80\\xf4\\x90\\x80\\x80");  // surrogate, too large
  CHECK(printable("cut \xe6\xbc") == "cut \\xe6\\xbc");
  for (int c = 0; c < 256; ++c)
    for (int d = 0; d < 256; ++d) {
      const std::string out = printable(std::string{static_cast<char>(c), static_cast<char>(d)});
      CHECK_MESSAGE(is_utf8(out), c << ' ' << d);
      CHECK(printable(out) == out);
      for (const char x : out) CHECK(static_cast<unsigned char>(x) >= 0x20);
    }
  CHECK(is_utf8("漢"));
  CHECK_FALSE(is_utf8("\xff"));
}
