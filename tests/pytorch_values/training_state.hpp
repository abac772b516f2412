// SPDX-License-Identifier: Apache-2.0
#pragma once

// Written by training_state.py with PyTorch 2.15.0. Do not edit.

#include <map>
#include <string>
#include <vector>

namespace pytorch_values {

struct SavedTraining {
  std::map<std::string, std::string> files;
  std::vector<double> continued;  // parameters and buffers, the steps that are more later
};

constexpr int steps = 5, more_steps = 7;

inline const std::map<std::string, SavedTraining> begun_in_cpp = {
    {"float32",
     {{
     {"manifest.json", std::string("{\012  \"crc32\": \"d660c4fa\",\012  \"format\": \"gradaccum training state\",\012  \"format_version\""
     ": 1,\012  \"gradaccum\": \"0.1.0\",\012  \"libtorch\": \"2.15.0\",\012  \"files\": {\012    \"model.s"
     "afetensors\": {\012      \"bytes\": 656,\012      \"crc32\": \"8183bc3a\"\012    },\012    \"optimize"
     "r.safetensors\": {\012      \"bytes\": 1264,\012      \"crc32\": \"0a3824d8\"\012    }\012  },\012  \""
     "values\": {\012    \"made\": 5,\012    \"optimizer.class\": \"AdamW\",\012    \"optimizer.group0.amsg"
     "rad\": false,\012    \"optimizer.group0.beta1\": 0.9,\012    \"optimizer.group0.beta2\": 0.999,\012  "
     "  \"optimizer.group0.eps\": 1e-08,\012    \"optimizer.group0.lr\": 0.02,\012    \"optimizer.group0.pa"
     "rameters\": 3,\012    \"optimizer.group0.weight_decay\": 0.1,\012    \"optimizer.group1.amsgrad\": fa"
     "lse,\012    \"optimizer.group1.beta1\": 0.9,\012    \"optimizer.group1.beta2\": 0.999,\012    \"optim"
     "izer.group1.eps\": 1e-08,\012    \"optimizer.group1.lr\": 0.01,\012    \"optimizer.group1.parameters\""
     ": 2,\012    \"optimizer.group1.weight_decay\": 0.1,\012    \"optimizer.groups\": 2\012  }\012}\012", 929)},
     {"model.safetensors", std::string("(\002\000\000\000\000\000\000{\"__metadata__\":{\"format\":\"pt\"},\"1.num_batches_tracked\":{\"dtype"
     "\":\"I64\",\"shape\":[],\"data_offsets\":[0,8]},\"0.weight\":{\"dtype\":\"F32\",\"shape\":[3,2],\"dat"
     "a_offsets\":[8,32]},\"1.bias\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[32,44]},\"1.running"
     "_mean\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[44,56]},\"1.running_var\":{\"dtype\":\"F32"
     "\",\"shape\":[3],\"data_offsets\":[56,68]},\"1.weight\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offse"
     "ts\":[68,80]},\"2.bias\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[80,84]},\"2.weight\":{\"d"
     "type\":\"F32\",\"shape\":[1,3],\"data_offsets\":[84,96]}}    \005\000\000\000\000\000\000\0002\012M\275"
     "\223yP?\236\322Z?\302\226B>)tM\277\233\212g\277bq\236>uY\341\276\037/d\277=\3543<\005\200\252\273$\371"
     "\270\273wF<?\320\203J?4\227\207?\332*\300\276\313\264??\374\203a?\336\036>?I\325\370\276\341\013\275>"
     "\024\263o?", 656)},
     {"optimizer.safetensors", std::string("@\004\000\000\000\000\000\000{\"__metadata__\":{\"format\":\"pt\"},\"step.0.weight\":{\"dtype\":\"F64"
     "\",\"shape\":[],\"data_offsets\":[0,8]},\"step.1.bias\":{\"dtype\":\"F64\",\"shape\":[],\"data_offset"
     "s\":[8,16]},\"step.1.weight\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[16,24]},\"step.2.bias"
     "\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[24,32]},\"step.2.weight\":{\"dtype\":\"F64\",\"s"
     "hape\":[],\"data_offsets\":[32,40]},\"exp_avg.0.weight\":{\"dtype\":\"F32\",\"shape\":[3,2],\"data_of"
     "fsets\":[40,64]},\"exp_avg.1.bias\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[64,76]},\"exp_"
     "avg.1.weight\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[76,88]},\"exp_avg.2.bias\":{\"dtype"
     "\":\"F32\",\"shape\":[1],\"data_offsets\":[88,92]},\"exp_avg.2.weight\":{\"dtype\":\"F32\",\"shape\":"
     "[1,3],\"data_offsets\":[92,104]},\"exp_avg_sq.0.weight\":{\"dtype\":\"F32\",\"shape\":[3,2],\"data_of"
     "fsets\":[104,128]},\"exp_avg_sq.1.bias\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[128,140]}"
     ",\"exp_avg_sq.1.weight\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[140,152]},\"exp_avg_sq.2."
     "bias\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[152,156]},\"exp_avg_sq.2.weight\":{\"dtype\""
     ":\"F32\",\"shape\":[1,3],\"data_offsets\":[156,168]}}       \000\000\000\000\000\000\024@\000\000\000"
     "\000\000\000\024@\000\000\000\000\000\000\024@\000\000\000\000\000\000\024@\000\000\000\000\000\000\024"
     "@\270si<\356\212\3159\376.\236<\177M\330\275f?\332=\311\374\264\275\273\306\366>\273\014\277\276y\341"
     "g\277s\262\216>0\021\332\275\025\220\332>%\221o\277\261k0\276n\305\220>u\244\247?A\225\3076\032L\3101"
     "\213\31487\023\003\2639H\277\2679\371\376x9\201}\356;#\223\217;_8\321<\311Q\036;b\226\2739\315\312\272"
     ";\262\217\335<\232[\217:hy-;\316\371\\=", 1264)},
     }, {-0.1213395893573761, 0.7415735125541687, 0.778701663017273, 0.2548677623271942, -0.8621862530708313, -0.8312276601791382, -0.4988759756088257, 0.8629970550537109, 0.7420282363891602, 0.1787332147359848, -0.3087565302848816, -0.7513300180435181, 0.018950948491692543, -0.007430959027260542, -0.008218744769692421, 0.5000972151756287, 0.6198239326477051, 1.0941250324249268, 12.0, -0.4420256018638611, 0.3099524676799774, 0.8669328689575195, 0.8616836071014404}}},
    {"float64",
     {{
     {"manifest.json", std::string("{\012  \"crc32\": \"03a947f9\",\012  \"format\": \"gradaccum training state\",\012  \"format_version\""
     ": 1,\012  \"gradaccum\": \"0.1.0\",\012  \"libtorch\": \"2.15.0\",\012  \"files\": {\012    \"model.s"
     "afetensors\": {\012      \"bytes\": 752,\012      \"crc32\": \"3d371b32\"\012    },\012    \"optimize"
     "r.safetensors\": {\012      \"bytes\": 1400,\012      \"crc32\": \"f1009cce\"\012    }\012  },\012  \""
     "values\": {\012    \"made\": 5,\012    \"optimizer.class\": \"AdamW\",\012    \"optimizer.group0.amsg"
     "rad\": false,\012    \"optimizer.group0.beta1\": 0.9,\012    \"optimizer.group0.beta2\": 0.999,\012  "
     "  \"optimizer.group0.eps\": 1e-08,\012    \"optimizer.group0.lr\": 0.02,\012    \"optimizer.group0.pa"
     "rameters\": 3,\012    \"optimizer.group0.weight_decay\": 0.1,\012    \"optimizer.group1.amsgrad\": fa"
     "lse,\012    \"optimizer.group1.beta1\": 0.9,\012    \"optimizer.group1.beta2\": 0.999,\012    \"optim"
     "izer.group1.eps\": 1e-08,\012    \"optimizer.group1.lr\": 0.01,\012    \"optimizer.group1.parameters\""
     ": 2,\012    \"optimizer.group1.weight_decay\": 0.1,\012    \"optimizer.groups\": 2\012  }\012}\012", 929)},
     {"model.safetensors", std::string("0\002\000\000\000\000\000\000{\"__metadata__\":{\"format\":\"pt\"},\"1.num_batches_tracked\":{\"dtype"
     "\":\"I64\",\"shape\":[],\"data_offsets\":[0,8]},\"0.weight\":{\"dtype\":\"F64\",\"shape\":[3,2],\"dat"
     "a_offsets\":[8,56]},\"1.bias\":{\"dtype\":\"F64\",\"shape\":[3],\"data_offsets\":[56,80]},\"1.running"
     "_mean\":{\"dtype\":\"F64\",\"shape\":[3],\"data_offsets\":[80,104]},\"1.running_var\":{\"dtype\":\"F6"
     "4\",\"shape\":[3],\"data_offsets\":[104,128]},\"1.weight\":{\"dtype\":\"F64\",\"shape\":[3],\"data_of"
     "fsets\":[128,152]},\"2.bias\":{\"dtype\":\"F64\",\"shape\":[1],\"data_offsets\":[152,160]},\"2.weight"
     "\":{\"dtype\":\"F64\",\"shape\":[1,3],\"data_offsets\":[160,184]}}   \005\000\000\000\000\000\000\000"
     "(\206b-F\241\251\277\301V\357G.\017\352?\023N\227rSZ\353?~H\342?\330R\310?7g\231'\205\256\351\277\311"
     "[(AS\361\354\277e\355o\017,\316\323?P\302\260\002.+\334\277KA\\\265\343\205\354\277\221\266C>\205}\206"
     "?\236\254\312y\000Pu\277\261\340\004\026$\037w\2773\024\364U\316\210\347?2\265\016$zP\351?1\034\233\204"
     "\346\362\360?\020\305\235\"[\005\330\277I3}c\231\366\347?\022u\262\353~0\354?\\\211\"\177\333\303\347"
     "?\262\362x\220\250\032\337\2775*\301\336{\241\327?\221\346\232=b\366\355?", 752)},
     {"optimizer.safetensors", std::string("H\004\000\000\000\000\000\000{\"__metadata__\":{\"format\":\"pt\"},\"exp_avg.0.weight\":{\"dtype\":\""
     "F64\",\"shape\":[3,2],\"data_offsets\":[0,48]},\"exp_avg.1.bias\":{\"dtype\":\"F64\",\"shape\":[3],\""
     "data_offsets\":[48,72]},\"exp_avg.1.weight\":{\"dtype\":\"F64\",\"shape\":[3],\"data_offsets\":[72,96"
     "]},\"exp_avg.2.bias\":{\"dtype\":\"F64\",\"shape\":[1],\"data_offsets\":[96,104]},\"exp_avg.2.weight\""
     ":{\"dtype\":\"F64\",\"shape\":[1,3],\"data_offsets\":[104,128]},\"exp_avg_sq.0.weight\":{\"dtype\":\""
     "F64\",\"shape\":[3,2],\"data_offsets\":[128,176]},\"exp_avg_sq.1.bias\":{\"dtype\":\"F64\",\"shape\":"
     "[3],\"data_offsets\":[176,200]},\"exp_avg_sq.1.weight\":{\"dtype\":\"F64\",\"shape\":[3],\"data_offse"
     "ts\":[200,224]},\"exp_avg_sq.2.bias\":{\"dtype\":\"F64\",\"shape\":[1],\"data_offsets\":[224,232]},\""
     "exp_avg_sq.2.weight\":{\"dtype\":\"F64\",\"shape\":[1,3],\"data_offsets\":[232,256]},\"step.0.weight\""
     ":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[256,264]},\"step.1.bias\":{\"dtype\":\"F64\",\"sha"
     "pe\":[],\"data_offsets\":[264,272]},\"step.1.weight\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\""
     ":[272,280]},\"step.2.bias\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[280,288]},\"step.2.weig"
     "ht\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[288,296]}} H\0362Az.\215?6\237\353n\201\2619?\015"
     "\031=\314\337\305\223?%q\223\215\257\011\273\277\177I\374T\354G\273?n\014s\230\230\237\266\277\236\343"
     "\322\236\326\330\336?X\217F\345\226\341\327\277Y\021\322\216.\374\354\277\304\356\004\370M\326\321?\033"
     "\006rG%B\273\277-!\006\333\001R\333?\257\252\374,$\362\355\2771^\367\330u\015\306\277\022\267\253]\255"
     "\030\322?\034\320c\014\216\364\364?\312\244\330\177\255\362\330>\374\220\007\017\231\0119>\037y\034\212"
     "\221\031\347>\337\324\013\343a`6?[\202`m\350\3676?\230ju\220\335\037/?\024\023\253\316\256\317}?\004\253"
     "x\237c\362q?\277\336I\344\012'\232?\2005{W8\312c?hC\205\313\312r7?\222\265\232\214XYw?\177\222fs\365\261"
     "\233?s+i\273r\353Q?\302\343\011\002,\257e?\366\215_{8\237\253?\000\000\000\000\000\000\024@\000\000\000"
     "\000\000\000\024@\000\000\000\000\000\000\024@\000\000\000\000\000\000\024@\000\000\000\000\000\000\024"
     "@", 1400)},
     }, {-0.1213395883234218, 0.7415712596045375, 0.7787015110829473, 0.2548677510765645, -0.8621861191998522, -0.8312274524482365, -0.4988758964737254, 0.8629969151428034, 0.7420277334447819, 0.1787331260452472, -0.3087563854655279, -0.7513298138405834, 0.018950900126003194, -0.007430959048680466, -0.008218743778312955, 0.5000962982544784, 0.6198239319029327, 1.0941249292455355, 12.0, -0.44202536516982033, 0.3099523868027081, 0.8669326654265709, 0.8616833939387402}}},
};

inline const std::map<std::string, SavedTraining> begun_in_python = {
    {"float32",
     {{
     {"manifest.json", std::string("{\012  \"crc32\": \"4f272531\",\012  \"format\": \"gradaccum training state\",\012  \"format_version\""
     ": 1,\012  \"gradaccum\": \"0.1.0\",\012  \"libtorch\": \"2.15.0\",\012  \"files\": {\012    \"model.s"
     "afetensors\": {\012      \"bytes\": 624,\012      \"crc32\": \"7c5a15b6\"\012    },\012    \"optimize"
     "r.safetensors\": {\012      \"bytes\": 1232,\012      \"crc32\": \"fcc802dd\"\012    }\012  },\012  \""
     "values\": {\012    \"made\": 5,\012    \"optimizer.class\": \"AdamW\",\012    \"optimizer.group0.amsg"
     "rad\": false,\012    \"optimizer.group0.beta1\": 0.9,\012    \"optimizer.group0.beta2\": 0.999,\012  "
     "  \"optimizer.group0.eps\": 1e-08,\012    \"optimizer.group0.lr\": 0.02,\012    \"optimizer.group0.pa"
     "rameters\": 3,\012    \"optimizer.group0.weight_decay\": 0.1,\012    \"optimizer.group1.amsgrad\": fa"
     "lse,\012    \"optimizer.group1.beta1\": 0.9,\012    \"optimizer.group1.beta2\": 0.999,\012    \"optim"
     "izer.group1.eps\": 1e-08,\012    \"optimizer.group1.lr\": 0.01,\012    \"optimizer.group1.parameters\""
     ": 2,\012    \"optimizer.group1.weight_decay\": 0.1,\012    \"optimizer.groups\": 2\012  }\012}", 928)},
     {"model.safetensors", std::string("\010\002\000\000\000\000\000\000{\"1.num_batches_tracked\":{\"dtype\":\"I64\",\"shape\":[],\"data_off"
     "sets\":[0,8]},\"0.weight\":{\"dtype\":\"F32\",\"shape\":[3,2],\"data_offsets\":[8,32]},\"1.bias\":{\""
     "dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[32,44]},\"1.running_mean\":{\"dtype\":\"F32\",\"shape"
     "\":[3],\"data_offsets\":[44,56]},\"1.running_var\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":"
     "[56,68]},\"1.weight\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[68,80]},\"2.bias\":{\"dtype\""
     ":\"F32\",\"shape\":[1],\"data_offsets\":[80,84]},\"2.weight\":{\"dtype\":\"F32\",\"shape\":[1,3],\"da"
     "ta_offsets\":[84,96]}}   \005\000\000\000\000\000\000\0001\012M\275\227yP?\236\322Z?\303\226B>*tM\277"
     "\233\212g\277bq\236>uY\341\276\037/d\277>\3543<\003\200\252\273$\371\270\273wF<?\320\203J?4\227\207?\332"
     "*\300\276\313\264??\374\203a?\336\036>?I\325\370\276\341\013\275>\024\263o?", 624)},
     {"optimizer.safetensors", std::string(" \004\000\000\000\000\000\000{\"step.0.weight\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[0,8"
     "]},\"step.1.bias\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[8,16]},\"step.1.weight\":{\"dtyp"
     "e\":\"F64\",\"shape\":[],\"data_offsets\":[16,24]},\"step.2.bias\":{\"dtype\":\"F64\",\"shape\":[],\""
     "data_offsets\":[24,32]},\"step.2.weight\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[32,40]},\""
     "exp_avg.0.weight\":{\"dtype\":\"F32\",\"shape\":[3,2],\"data_offsets\":[40,64]},\"exp_avg.1.bias\":{\""
     "dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[64,76]},\"exp_avg.1.weight\":{\"dtype\":\"F32\",\"sha"
     "pe\":[3],\"data_offsets\":[76,88]},\"exp_avg.2.bias\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets"
     "\":[88,92]},\"exp_avg.2.weight\":{\"dtype\":\"F32\",\"shape\":[1,3],\"data_offsets\":[92,104]},\"exp_"
     "avg_sq.0.weight\":{\"dtype\":\"F32\",\"shape\":[3,2],\"data_offsets\":[104,128]},\"exp_avg_sq.1.bias\""
     ":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[128,140]},\"exp_avg_sq.1.weight\":{\"dtype\":\"F3"
     "2\",\"shape\":[3],\"data_offsets\":[140,152]},\"exp_avg_sq.2.bias\":{\"dtype\":\"F32\",\"shape\":[1],"
     "\"data_offsets\":[152,156]},\"exp_avg_sq.2.weight\":{\"dtype\":\"F32\",\"shape\":[1,3],\"data_offsets"
     "\":[156,168]}}      \000\000\000\000\000\000\024@\000\000\000\000\000\000\024@\000\000\000\000\000\000"
     "\024@\000\000\000\000\000\000\024@\000\000\000\000\000\000\024@\271si<\241\213\3159\375.\236<\177M\330"
     "\275f?\332=\311\374\264\275\273\306\366>\273\014\277\276y\341g\277s\262\216>0\021\332\275\024\220\332"
     ">%\221o\277\262k0\276o\305\220>u\244\247?C\225\3076\256M\3101\212\31487\022\003\2639H\277\2679\370\376"
     "x9\202}\356;#\223\217;_8\321<\311Q\036;a\226\2739\315\312\272;\262\217\335<\233[\217:hy-;\315\371\\=", 1232)},
     }, {-0.1213395968079567, 0.741573691368103, 0.778701663017273, 0.2548677921295166, -0.8621863126754761, -0.8312276601791382, -0.4988759756088257, 0.8629970550537109, 0.7420282363891602, 0.1787332147359848, -0.3087565302848816, -0.7513300180435181, 0.018950946629047394, -0.007430959492921829, -0.008218742907047272, 0.5000972747802734, 0.6198239326477051, 1.0941250324249268, 12.0, -0.4420256018638611, 0.30995243787765503, 0.8669328689575195, 0.8616836071014404}}},
    {"float64",
     {{
     {"manifest.json", std::string("{\012  \"crc32\": \"551b22dc\",\012  \"format\": \"gradaccum training state\",\012  \"format_version\""
     ": 1,\012  \"gradaccum\": \"0.1.0\",\012  \"libtorch\": \"2.15.0\",\012  \"files\": {\012    \"model.s"
     "afetensors\": {\012      \"bytes\": 720,\012      \"crc32\": \"b273d1fc\"\012    },\012    \"optimize"
     "r.safetensors\": {\012      \"bytes\": 1368,\012      \"crc32\": \"d8a87f84\"\012    }\012  },\012  \""
     "values\": {\012    \"made\": 5,\012    \"optimizer.class\": \"AdamW\",\012    \"optimizer.group0.amsg"
     "rad\": false,\012    \"optimizer.group0.beta1\": 0.9,\012    \"optimizer.group0.beta2\": 0.999,\012  "
     "  \"optimizer.group0.eps\": 1e-08,\012    \"optimizer.group0.lr\": 0.02,\012    \"optimizer.group0.pa"
     "rameters\": 3,\012    \"optimizer.group0.weight_decay\": 0.1,\012    \"optimizer.group1.amsgrad\": fa"
     "lse,\012    \"optimizer.group1.beta1\": 0.9,\012    \"optimizer.group1.beta2\": 0.999,\012    \"optim"
     "izer.group1.eps\": 1e-08,\012    \"optimizer.group1.lr\": 0.01,\012    \"optimizer.group1.parameters\""
     ": 2,\012    \"optimizer.group1.weight_decay\": 0.1,\012    \"optimizer.groups\": 2\012  }\012}", 928)},
     {"model.safetensors", std::string("\020\002\000\000\000\000\000\000{\"1.num_batches_tracked\":{\"dtype\":\"I64\",\"shape\":[],\"data_off"
     "sets\":[0,8]},\"0.weight\":{\"dtype\":\"F64\",\"shape\":[3,2],\"data_offsets\":[8,56]},\"1.bias\":{\""
     "dtype\":\"F64\",\"shape\":[3],\"data_offsets\":[56,80]},\"1.running_mean\":{\"dtype\":\"F64\",\"shape"
     "\":[3],\"data_offsets\":[80,104]},\"1.running_var\":{\"dtype\":\"F64\",\"shape\":[3],\"data_offsets\""
     ":[104,128]},\"1.weight\":{\"dtype\":\"F64\",\"shape\":[3],\"data_offsets\":[128,152]},\"2.bias\":{\"d"
     "type\":\"F64\",\"shape\":[1],\"data_offsets\":[152,160]},\"2.weight\":{\"dtype\":\"F64\",\"shape\":[1"
     ",3],\"data_offsets\":[160,184]}}  \005\000\000\000\000\000\000\000(\206b-F\241\251\277\301V\357G.\017"
     "\352?\023N\227rSZ\353?}H\342?\330R\310?7g\231'\205\256\351\277\311[(AS\361\354\277d\355o\017,\316\323"
     "?P\302\260\002.+\334\277KA\\\265\343\205\354\277\221\266C>\205}\206?\237\254\312y\000Pu\277\261\340\004"
     "\026$\037w\2773\024\364U\316\210\347?2\265\016$zP\351?1\034\233\204\346\362\360?\020\305\235\"[\005\330"
     "\277I3}c\231\366\347?\022u\262\353~0\354?\\\211\"\177\333\303\347?\262\362x\220\250\032\337\2775*\301"
     "\336{\241\327?\221\346\232=b\366\355?", 720)},
     {"optimizer.safetensors", std::string("(\004\000\000\000\000\000\000{\"exp_avg.0.weight\":{\"dtype\":\"F64\",\"shape\":[3,2],\"data_offsets\""
     ":[0,48]},\"exp_avg.1.bias\":{\"dtype\":\"F64\",\"shape\":[3],\"data_offsets\":[48,72]},\"exp_avg.1.we"
     "ight\":{\"dtype\":\"F64\",\"shape\":[3],\"data_offsets\":[72,96]},\"exp_avg.2.bias\":{\"dtype\":\"F64"
     "\",\"shape\":[1],\"data_offsets\":[96,104]},\"exp_avg.2.weight\":{\"dtype\":\"F64\",\"shape\":[1,3],\""
     "data_offsets\":[104,128]},\"exp_avg_sq.0.weight\":{\"dtype\":\"F64\",\"shape\":[3,2],\"data_offsets\""
     ":[128,176]},\"exp_avg_sq.1.bias\":{\"dtype\":\"F64\",\"shape\":[3],\"data_offsets\":[176,200]},\"exp_"
     "avg_sq.1.weight\":{\"dtype\":\"F64\",\"shape\":[3],\"data_offsets\":[200,224]},\"exp_avg_sq.2.bias\":"
     "{\"dtype\":\"F64\",\"shape\":[1],\"data_offsets\":[224,232]},\"exp_avg_sq.2.weight\":{\"dtype\":\"F64"
     "\",\"shape\":[1,3],\"data_offsets\":[232,256]},\"step.0.weight\":{\"dtype\":\"F64\",\"shape\":[],\"da"
     "ta_offsets\":[256,264]},\"step.1.bias\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[264,272]},\""
     "step.1.weight\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[272,280]},\"step.2.bias\":{\"dtype\""
     ":\"F64\",\"shape\":[],\"data_offsets\":[280,288]},\"step.2.weight\":{\"dtype\":\"F64\",\"shape\":[],\""
     "data_offsets\":[288,296]}}G\0362Az.\215?#\237\353n\201\2619?\013\031=\314\337\305\223?%q\223\215\257\011"
     "\273\277\177I\374T\354G\273?o\014s\230\230\237\266\277\236\343\322\236\326\330\336?X\217F\345\226\341"
     "\327\277Y\021\322\216.\374\354\277\304\356\004\370M\326\321?\033\006rG%B\273\277-!\006\333\001R\333?\256"
     "\252\374,$\362\355\2771^\367\330u\015\306\277\021\267\253]\255\030\322?\034\320c\014\216\364\364?\312"
     "\244\330\177\255\362\330>\317\220\007\017\231\0119>\032y\034\212\221\031\347>\340\324\013\343a`6?[\202"
     "`m\350\3676?\232ju\220\335\037/?\024\023\253\316\256\317}?\004\253x\237c\362q?\277\336I\344\012'\232?"
     "\2005{W8\312c?gC\205\313\312r7?\222\265\232\214XYw?~\222fs\365\261\233?s+i\273r\353Q?\302\343\011\002"
     ",\257e?\365\215_{8\237\253?\000\000\000\000\000\000\024@\000\000\000\000\000\000\024@\000\000\000\000"
     "\000\000\024@\000\000\000\000\000\000\024@\000\000\000\000\000\000\024@", 1368)},
     }, {-0.1213395883234218, 0.7415712596045375, 0.7787015110829473, 0.2548677510765645, -0.8621861191998522, -0.8312274524482365, -0.4988758964737254, 0.8629969151428034, 0.7420277334447819, 0.17873312604524713, -0.3087563854655279, -0.7513298138405834, 0.018950900126003194, -0.007430959048680466, -0.008218743778312955, 0.5000962982544784, 0.6198239319029327, 1.0941249292455355, 12.0, -0.44202536516982033, 0.3099523868027081, 0.8669326654265708, 0.8616833939387402}}},
};

}  // namespace pytorch_values
