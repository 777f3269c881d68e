# Prints "amount<TAB>name" for each name.
BEGIN { FS = "," }

NR == 1 && $1 == "name" { next }
NF == 0 { next }
region != "" && index($2, region) != 1 { next }

$3 ~ /^[0-9]+/ { sum[$1] += int($3) }

END {
  for (name in sum)
    printf "%d\t%s\n", sum[name], name
}
