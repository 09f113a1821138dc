"""Bytes that arrive at a server and are no request of ours, by what they are."""

KEEP = "Host: 127.0.0.1\r\n"

RAW = {
    "nothing but zeros": b"\0" * 5000,
    "TLS": bytes.fromhex("16030100c8010000c40303") + b"\x41" * 200,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 100,
    "HTTP/0.9": b"GET /\r\n",
    "no version": b"GET / \r\n\r\n",
    "a strange version": b"GET / HTTP/9.9\r\n" + KEEP.encode() + b"\r\n",
    "no host": b"GET /api/me HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /api/me HTTP/1.1\r\n" + KEEP.encode() + b"Host: evil.example\r\n\r\n",
    "a full address": b"GET http://evil.example/api/me HTTP/1.1\r\n" + KEEP.encode() + b"\r\n",
    "a tunnel": b"CONNECT db:5432 HTTP/1.1\r\n" + KEEP.encode() + b"\r\n",
    "a star": b"OPTIONS * HTTP/1.1\r\n" + KEEP.encode() + b"\r\n",
    "two lengths": b"POST /api/login HTTP/1.1\r\n"
    + KEEP.encode()
    + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "length and chunks": b"POST /api/login HTTP/1.1\r\n"
    + KEEP.encode()
    + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /api/runs HTTP/1.1\r\n\r\n",
    "a negative length": b"POST /api/login HTTP/1.1\r\n" + KEEP.encode() + b"Content-Length: -1\r\n\r\n",
    "a huge length": b"POST /api/login HTTP/1.1\r\n" + KEEP.encode() + b"Content-Length: 99999999999999999999\r\n\r\n",
    "a length in letters": b"POST /api/login HTTP/1.1\r\n" + KEEP.encode() + b"Content-Length: 0x10\r\n\r\n",
    "a chunk that lies": b"POST /api/login HTTP/1.1\r\n"
    + KEEP.encode()
    + b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFF\r\nx",
    "a chunk of rubbish": b"POST /api/login HTTP/1.1\r\n"
    + KEEP.encode()
    + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nx",
    "another coding": b"POST /api/login HTTP/1.1\r\n" + KEEP.encode() + b"Transfer-Encoding: gzip\r\n\r\nx",
    "a header of 100 kB": b"GET / HTTP/1.1\r\n" + KEEP.encode() + b"X-A: " + b"a" * 100_000 + b"\r\n\r\n",
    "5,000 headers": b"GET / HTTP/1.1\r\n" + KEEP.encode() + b"X: y\r\n" * 5000 + b"\r\n",
    "an address of 100 kB": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n" + KEEP.encode() + b"\r\n",
    "a folded header": b"GET / HTTP/1.1\r\n" + KEEP.encode() + b"X-A: b\r\n c\r\n\r\n",
    "a bare return": b"GET / HTTP/1.1\r" + KEEP.encode() + b"\r\n\r\n",
    "a zero in a header": b"GET / HTTP/1.1\r\n" + KEEP.encode() + b"X-A: a\0b\r\n\r\n",
    "a space before the colon": b"GET / HTTP/1.1\r\nHost : 127.0.0.1\r\n\r\n",
    "a zero in the address": b"GET /%00 HTTP/1.1\r\n" + KEEP.encode() + b"\r\n",
    "half a character": b"GET /%ff%fe HTTP/1.1\r\n" + KEEP.encode() + b"\r\n",
    "dots": b"GET /../../etc/passwd HTTP/1.1\r\n" + KEEP.encode() + b"\r\n",
    "an upgrade": b"GET /api/stream HTTP/1.1\r\n"
    + KEEP.encode()
    + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
    "a cookie of rubbish": b"GET /api/me HTTP/1.1\r\n" + KEEP.encode() + b'Cookie: tether="\\\\;;==;\xff\r\n\r\n',
    "10,000 cookies": b"GET /api/me HTTP/1.1\r\n" + KEEP.encode() + b"Cookie: " + b"a=b; " * 10_000 + b"\r\n\r\n",
    "a bearer of 50 kB": b"GET /api/me HTTP/1.1\r\n"
    + KEEP.encode()
    + b"Authorization: Bearer "
    + b"a" * 50_000
    + b"\r\n\r\n",
    "a bearer in Latin": b"GET /api/me HTTP/1.1\r\n" + KEEP.encode() + b"Authorization: Bearer \xe9\xff\r\n\r\n",
    "1,000 requests in one": (b"GET / HTTP/1.1\r\n" + KEEP.encode() + b"\r\n") * 1000,
    "waiting for 100": b"POST /api/login HTTP/1.1\r\n"
    + KEEP.encode()
    + b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\n",
}
