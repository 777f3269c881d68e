"""Questions of the registry as rows of NeMo Gym, one line of JSON each: `python rows.py 8 > rows.jsonl`."""

import json
import sys
from random import Random

from towline.tiny.registry import draw

for number in range(int(sys.argv[1])):
    instance = draw(Random(number))
    (asked,) = instance.questions
    question = {"attribute": asked.attribute, "item": asked.item, "choices": list(asked.choices)}
    row = {
        "agent_ref": {"type": "responses_api_agents", "name": "towline_agent"},
        "responses_create_params": {"input": [{"role": "user", "content": asked.text}]},
        "registry": instance.to_json(),
        "instance": {"records": instance.records, "question": question},
    }
    print(json.dumps(row))
