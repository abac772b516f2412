# SPDX-License-Identifier: Apache-2.0
#
# A header includes only headers of lower floors, or of its own; floor 0 only the standard library.
# cmake -D INCLUDE=include -P floors.cmake

set(floor_5 "^gradaccum\\.hpp$")
set(floor_4 "^trainer\\.hpp$|^detail/trainer/")
set(floor_3 "^policies/|^policies\\.hpp$")
set(floor_2 "^(grad_accumulator|amp_scaler|clip_grad|checkpoint|checkpointed_sequential|policy|fit_options|fit_report|metrics|metrics_file|progress_line|learning_rates|replicas|state_parts|training_state|verify_accumulation)\\.hpp$|^(optim|io|data)/")
set(floor_1 "^(archive|gradients|factor|embedding|keep_freed_memory|loss|process_group|window|concepts|autocast|checkpoint_options|checkpoint_plan|saved_tensor_hooks|memory_meter)\\.hpp$|^detail/")
set(floor_0 "^version\\.hpp$|^lr/")

function(floor_of header result)
  foreach(floor IN ITEMS 5 4 3 2 1 0)
    if(header MATCHES "${floor_${floor}}")
      set(${result} ${floor} PARENT_SCOPE)
      return()
    endif()
  endforeach()
  message(SEND_ERROR "${header} is on no floor: say on which in tests/support/floors.cmake")
endfunction()

file(GLOB_RECURSE headers RELATIVE "${INCLUDE}/gradaccum" "${INCLUDE}/gradaccum/*.hpp")
if(NOT headers)
  message(FATAL_ERROR "no headers in ${INCLUDE}/gradaccum")
endif()
foreach(header IN LISTS headers)
  floor_of("${header}" floor)
  file(STRINGS "${INCLUDE}/gradaccum/${header}" includes REGEX "^#include ")
  foreach(line IN LISTS includes)
    if(line MATCHES "<gradaccum/([^>]+)>")
      set(included "${CMAKE_MATCH_1}")
      floor_of("${included}" below)
      if(below GREATER floor)
        message(SEND_ERROR "${header} (floor ${floor}) includes ${included} (floor ${below})")
      endif()
      string(APPEND umbrella_${floor} " ${included} ")
    elseif(floor EQUAL 0 AND line MATCHES "[/.]")
      message(SEND_ERROR "${header} (floor 0) includes more than the standard library: ${line}")
    endif()
  endforeach()
endforeach()

# The umbrella includes every public header, and nothing else.
foreach(header IN LISTS headers)
  if(NOT header MATCHES "^detail/|^gradaccum\\.hpp$" AND NOT umbrella_5 MATCHES " ${header} ")
    message(SEND_ERROR "gradaccum.hpp does not include ${header}")
  endif()
endforeach()
