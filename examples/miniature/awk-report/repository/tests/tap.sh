# The Test Anything Protocol for shell tests: `check NAME EXPECTED COMMAND...` compares what a command prints.
count=0
failed=0

check() {
  name=$1 expected=$2
  shift 2
  count=$((count + 1))
  if actual=$("$@" 2>&1) && [ "$actual" = "$expected" ]; then
    echo "ok $count - $name"
  else
    failed=1
    echo "not ok $count - $name"
    printf '%s\n' "$actual" | sed 's/^/# /'
  fi
}

finish() {
  echo "1..$count"
  exit "$failed"
}
