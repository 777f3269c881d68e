# Turns "amount<TAB>name" lines into columns and adds a total.
BEGIN { FS = "\t" }

{
  printf "%-20s %10d\n", $2, $1
  total += $1
}

END { printf "%-20s %10d\n", "total", total }
