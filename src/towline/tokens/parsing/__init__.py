"""One file a tool-call format; `towline.tokens.parser` is the entry point.

`base` is what a format is, `tagged` is the shared course of all formats that mark calls with tags in running text,
`scan` walks the text, `values` reads JSON strictly and `schema` types the values of formats that write them bare. To
add a format: one file with a class that names its markup (most derive from `Tagged`), its line in `parser.FORMATS`, its
mark in `detect`, and an entry in the tests' table.
"""
