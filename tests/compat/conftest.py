"""Blocking objects over a fake device."""

from blocking.conftest import device as device
from blocking.conftest import device_type as device_type
from blocking.conftest import each_tokenizer_is_loaded_once as each_tokenizer_is_loaded_once
from blocking.conftest import open_engine as open_engine
from blocking.conftest import open_llm as open_llm
from blocking.conftest import patient_device as patient_device
