"""Registry questions as NeMo Gym rows, one line of JSON each: `python rows.py 8 > rows.jsonl`."""

import json
import sys
from random import Random

from towline.demo.registry import draw_instance

for number in range(int(sys.argv[1])):
    instance = draw_instance(Random(number))
    (asked,) = instance.questions
    row = {
        "agent_ref": {"type": "responses_api_agents", "name": "towline_agent"},
        "responses_create_params": {"input": [{"role": "user", "content": asked.text}]},
        "registry": instance.to_json(),
        "instance": instance.to_arguments(),
    }
    print(json.dumps(row))
