#!/bin/sh
set -eu
cd /app/csvtool
awk '
  /^function fields\(/ {
    print "function fields(line, f,    n, i, c, inside, field) {"
    print "  sub(/\\r$/, \"\", line)"
    print "  n = 0; field = \"\"; inside = 0"
    print "  for (i = 1; i <= length(line); i++) {"
    print "    c = substr(line, i, 1)"
    print "    if (inside) {"
    print "      if (c != \"\\\"\") field = field c"
    print "      else if (substr(line, i + 1, 1) == \"\\\"\") { field = field c; i++ }"
    print "      else inside = 0"
    print "    } else if (c == \"\\\"\") inside = 1"
    print "    else if (c == \",\") { f[++n] = field; field = \"\" }"
    print "    else field = field c"
    print "  }"
    print "  f[++n] = field"
    print "  return n"
    print "}"
    skipping = 1
    next
  }
  skipping { if (/^}/) skipping = 0; next }
  /if \(!c\) exit; next/ {
    print "      NR == 1 { n = fields($0, f); c = find(ENVIRON[\"NAME\"], f, n)"
    print "                if (!c) { print \"csvtool: no column \" ENVIRON[\"NAME\"] >\"/dev/stderr\"; exit 2 }"
    print "                next }"
    next
  }
  { print }
' csvtool >csvtool.new
cat csvtool.new >csvtool
rm csvtool.new
sh test/run.sh
